"""Data of runs in a daemon's folder, and which of them no run needs any more."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import corpus_in
from dilocox.transport.store.files import find_chains

__all__ = ["Held", "held"]


@dataclass(frozen=True)
class Held:
    """Data of one corpus, or data that no run here names."""

    name: str
    """Name from its runs; empty without one."""
    needed_by: tuple[str, ...]
    """Runs that continue."""
    blobs: frozenset[bytes]
    size: int
    """Bytes on this disk."""


def held(home: Path, store: BlobStore) -> list[Held]:
    """Return the data by corpus, those of active runs first. A shared blob counts for the first. Raises LocalError if a
    run cannot be read: it may need any of them. Blocking."""
    names: dict[bytes, str] = {}
    needed: dict[bytes, list[str]] = {}
    for path in find_chains(home):
        with ChainFile.for_reading(path) as chain:
            data, run = chain.manifest.data, chain.manifest.run.name
            digest = bytes.fromhex(data.digest)
            names[digest] = data.name
            needed.setdefault(digest, []).extend([] if chain.head.finished else [run])
    sizes = _sizes(store)
    left, found, blind = store.digests() | store.partials(), [], list[str]()
    for digest in sorted(names, key=lambda digest: (not needed[digest], names[digest], digest)):
        corpus = corpus_in(store, digest)
        if corpus is None:
            blind += needed[digest]
        here = left & {digest, *(blob for blob, _ in (corpus.blobs if corpus is not None else []))}
        left -= here
        if here:
            found.append(Held(names[digest], tuple(needed[digest]), frozenset(here), sum(sizes[blob] for blob in here)))
    if left:  # a run without its corpus document may need any of it
        found.append(Held("", tuple(blind), frozenset(left), sum(sizes[blob] for blob in left)))
    return found


def _sizes(store: BlobStore) -> Counter[bytes]:
    """Return the bytes on disk by blob, with files beside it."""
    sizes: Counter[bytes] = Counter()
    for blob, path in store.files():
        sizes[blob] += path.stat().st_size
    return sizes
