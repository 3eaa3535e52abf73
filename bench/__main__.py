"""`make bench`: every bench, one after the other."""

from bench import attestation, codec, overlap, wire

if __name__ == "__main__":
    for bench in (wire, attestation, codec, overlap):
        print(f"\n== {bench.__name__}: {(bench.__doc__ or '').splitlines()[0]}", flush=True)
        bench.main()
