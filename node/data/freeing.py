"""What a daemon's folder holds of its runs' data, and which of it no run needs any more."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import corpus_in
from dilocox.transport.files import find_chains

__all__ = ["Held", "held"]


@dataclass(frozen=True)
class Held:
    """Of one corpus, or of what no run here names."""

    name: str
    """As its runs call it; empty where none does."""
    needed_by: tuple[str, ...]
    """Runs that go on."""
    blobs: frozenset[bytes]
    size: int
    """Bytes on this disk."""


def held(home: Path, store: BlobStore) -> list[Held]:
    """By corpus, those of runs that go on first. A blob of several is the first one's. Raises LocalError where a run cannot be
    read: it may need any of it. Blocking."""
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
    if left:  # a run whose corpus' own document is not here may need any of it
        found.append(Held("", tuple(blind), frozenset(left), sum(sizes[blob] for blob in left)))
    return found


def _sizes(store: BlobStore) -> Counter[bytes]:
    """Bytes on disk by blob, with what lies beside it."""
    sizes: Counter[bytes] = Counter()
    for blob, path in store.files():
        sizes[blob] += path.stat().st_size
    return sizes
