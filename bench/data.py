"""`python -m bench.data [--check] [--quick] [SOURCE…]`: rate at which text becomes a corpus, and its memory.

The table also shows the unavoidable work: reading and hashing the same bytes, and the encoder alone. --check exits with
1 if one core makes tokens from less than 10 MB of text a second.
"""

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import bench_parser, judge, table, write
from dilocox.node.data.build import build
from dilocox.node.data.finding import STDLIB, find_files
from dilocox.node.data.sources import documents
from dilocox.node.data.tokenizers import open_encoder, train_tokenizer
from dilocox.protocol.crypto import sha256

__all__ = ["main"]

BAR = 10.0
"""Megabytes of text in a second of processor time, with a `tokenizers` file."""
VOCABULARY = 32768
QUICK_BYTES = 2 << 20


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of a call, all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def main() -> None:
    parser = bench_parser("bench.data", __doc__, "2 MB of the text")
    parser.add_argument("sources", nargs="*", default=[STDLIB], metavar="SOURCE", help="default: the standard library")
    options = parser.parse_args()
    texts = [text for path in find_files(options.sources) for text, _ in documents(path, "text")]
    if options.quick:
        held = 0
        texts = [text for text in texts if (held := held + len(text)) <= QUICK_BYTES]
    with tempfile.TemporaryDirectory(prefix="dx-") as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_text(train_tokenizer(texts, VOCABULARY))
        source = folder / "text.txt"
        with source.open("w", newline="") as file:
            file.writelines(texts)
        rows, found = [], {}
        for label, name in (("bytes", "bytes"), ("bpe", str(tokenizer))):
            found[label] = measure(folder / label, source, name)
            rows.append([label, *(f"{value:,.2f}" for value in found[label].values())])
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{size / 1e6:.1f} MB of text, tokenizer of {VOCABULARY:,} trained on it; MB in a second of processor time, all threads"
    )
    table(["tokens", "built", "read and encoded alone", "read and hashed alone", "of encoding", "MiB more"], rows)
    write("data", {"bytes": size, **found})
    speed = found["bpe"]["built"]
    judge([f"{speed:.1f} MB/s of one core, less than {BAR:g}"] if speed < BAR else [], options.check)


def measure(folder: Path, source: Path, tokenizer: str) -> dict[str, float]:
    """Measure, each time with a new encoder: one that has read the text knows its pieces."""
    size, encoder = source.stat().st_size / 1e6, open_encoder(tokenizer)
    alone = seconds(lambda: encoder.encode([text for text, _ in documents(source, "text")]))
    hashed = seconds(lambda: sha256(*(text.encode() for text, _ in documents(source, "text"))))
    again = open_encoder(tokenizer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    built = seconds(lambda: build(folder, [source], again, held_out_every=8))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"built": size / built, "alone": size / alone, "hashed": size / hashed, "share": alone / built, "grown": grown}


if __name__ == "__main__":
    main()
