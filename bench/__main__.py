"""`make bench`: every bench in sequence; the benches of hostile connections and of faults in their short form."""

from functools import partial

from bench import attestation, codec, fuzz, overlap, restart, strangers, wire

if __name__ == "__main__":
    quick = {bench: partial(bench.main, ["--quick"]) for bench in (fuzz, strangers, restart)}
    for bench in (wire, attestation, codec, overlap, fuzz, strangers, restart):
        print(f"\n== {bench.__name__}: {(bench.__doc__ or '').splitlines()[0]}", flush=True)
        quick.get(bench, partial(bench.main, []))()
