"""`make bench`: every bench, one after the other; those of strangers in short."""

from functools import partial

from bench import attestation, codec, fuzz, overlap, strangers, wire

if __name__ == "__main__":
    quick = {fuzz: partial(fuzz.main, ["--quick"]), strangers: partial(strangers.main, ["--quick"])}
    for bench in (wire, attestation, codec, overlap, fuzz, strangers):
        print(f"\n== {bench.__name__}: {(bench.__doc__ or '').splitlines()[0]}", flush=True)
        quick.get(bench, bench.main)()
