"""Rate at which a state is written to an archive and read back, plain and sealed. Archives are a folder of this machine,
and a double of S3 in this process or a real bucket.

The bar is 30 MB/s each way: a link of 240 Mbit/s, which a rented host has. The table also shows the unavoidable parts:
hashing alone, and a plain copy of the same bytes that ends on disk.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from bench.report import bench_parser, judge, table, write
from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.transport.archive.archive import create_archive
from dilocox.transport.archive.sealing import make_key
from dilocox.transport.store.blobs import BlobStore
from tests.s3_double import s3_double

BAR = 30.0
"""MB/s."""
STAGES, STAGE_CHUNKS = 4, 16


def main() -> None:
    parser = bench_parser("bench.archive", __doc__, "one stage")
    parser.add_argument("--bucket", metavar="s3://BUCKET/PREFIX", help="a real one, which must be empty there; not the double")
    options = parser.parse_args()
    stages = 1 if options.quick else STAGES
    double = nullcontext() if options.bucket else s3_double(page=1000)
    with tempfile.TemporaryDirectory(prefix="bench-archive-") as scratch, double:
        folder = Path(scratch)
        store, key = BlobStore(folder / "blobs"), folder / "key"
        make_key(key)
        blobs = [store.put(os.urandom(limits.CHUNK_BYTES) for _ in range(STAGE_CHUNKS)) for _ in range(stages)]
        size = sum(store.size(blob) for blob in blobs) / 1e6
        found, rows = {}, []
        places = (("folder", str(folder / "archive")), (options.bucket or "S3 double", options.bucket or "s3://bucket"))
        for number, (place, url) in enumerate(places):
            for sealed in (False, True):
                label = f"{place}, sealed" if sealed else place
                found[label] = _measured(f"{url}/{number}{sealed}", key if sealed else None, store, blobs, folder / label)
                rows.append([label, *(f"{size / found[label][way]:,.0f}" for way in ("write", "read"))])
        copied = _seconds(lambda: _copy([store.path(blob) for blob in blobs], folder / "copy"))
        hashed = _seconds(lambda: [sha256(chunk) for blob in blobs for chunk in store.chunks(blob)])  # type: ignore[arg-type]
        rows += [["copied and on disk", f"{size / copied:,.0f}", "–"], ["hashed alone", "–", f"{size / hashed:,.0f}"]]
    print(f"{stages} stages of {STAGE_CHUNKS * limits.CHUNK_BYTES / 1e6:.0f} MB, {os.cpu_count()} cores; MB in a second")
    table(["archive", "written", "read"], rows)
    speeds = {label: {way: size / seconds for way, seconds in each.items()} for label, each in found.items()}
    write("archive", {"bytes": size * 1e6, "megabytes_per_second": speeds})
    slow = [(label, way, each[way]) for label, each in speeds.items() for way in each if each[way] < BAR]
    judge([f"{label}: {way} {speed:.0f} MB/s, less than {BAR:g}" for label, way, speed in slow], options.check)


def _measured(url: str, key: Path | None, store: BlobStore, blobs: list[bytes], into: Path) -> dict[str, float]:
    """Return the seconds of writing and of reading back."""
    run, other = sha256(b"bench"), BlobStore(into)
    archive = create_archive(url, run, key)
    wrote = _seconds(lambda: [archive.put(store, blob) for blob in blobs])
    archive = create_archive(url, run, key)
    read = _seconds(lambda: [archive.fetch(blob, other, limits.BLOB_BYTES) for blob in blobs])
    assert all(other.verify(blob) for blob in blobs)
    return {"write": wrote, "read": read}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _copy(sources: list[Path], target: Path) -> None:
    for source in sources:
        with source.open("rb") as read, target.open("wb") as file:
            while data := read.read(limits.CHUNK_BYTES):
                file.write(data)
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
