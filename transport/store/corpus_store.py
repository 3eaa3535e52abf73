"""Corpora on disk: a folder of blobs, and the digest of the corpus that was built there last.

A run names its data by digest, and an operator may name the folder of a copy: `--data NAME=DIR`. Only files with the
digest are read, so a manifest reaches no other file, whatever its author writes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.run.corpus import Corpus
from dilocox.protocol.run.manifest import NAME, Data
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.files import read_named, write_atomically

__all__ = [
    "DIGEST",
    "ExposedCorpus",
    "Folders",
    "corpus_in",
    "lacking",
    "last_built",
    "library",
    "named_store",
    "parse_folders",
    "remember_built",
    "weights_library",
    "weights_shelf",
]

Folders = Mapping[str, Path]
"""NAME -> DIR."""
SHOWN_CHARACTERS = 300
"""Most characters of a wrong option in a message: a shell may put anything there."""
DIGEST = "digest"
"""The file with the digest of the corpus that was last built in its folder."""


def parse_folders(options: Iterable[str]) -> dict[str, Path]:
    """Return the folder of each `--data NAME=DIR`, by name. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not re.fullmatch(NAME, name) or not folder or name in folders:
            raise ConfigError(f"--data {_short(option)}: use NAME=DIR, such as wikitext=/data/wikitext, each NAME once")
        folders[name] = _folder(option, Path(folder))
    return folders


def _folder(option: str, path: Path) -> Path:
    """Raises ConfigError where no folder is there."""
    try:
        if path.is_dir():
            return path.resolve()
        why = f"{_short(str(path))} is a file" if path.exists() else f"no folder {_short(str(path))}"
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"--data {_short(option)}: {why}. Use a folder that `dilocox data build` made")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def library(name: str) -> Path:
    """Return the folder where `dilocox data build NAME` writes a corpus by default."""
    return base_folder() / "data" / name


def weights_library() -> Path:
    """Return the folder where `dilocox init --from` writes imported weights."""
    return base_folder() / "weights"


def remember_built(folder: Path, digest: bytes) -> None:
    write_atomically(folder / DIGEST, digest.hex().encode() + b"\n")


def last_built(folder: Path) -> bytes:
    """Digest of the corpus that was last built in the folder. Raises ConfigError."""
    try:
        digest = bytes.fromhex(read_named(folder / DIGEST).strip())
    except (ConfigError, OSError, ValueError):
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{folder} contains no corpus. Make one: dilocox data build NAME SOURCE…")
    return digest


def corpus_in(store: BlobStore, digest: bytes) -> Corpus | None:
    """Return the corpus; None if its document is missing. Blocking."""
    try:
        return Corpus.from_canonical(store.read(digest)) if store.sound(digest) else None
    except RemoteError:
        return None


def blobs_of(store: BlobStore, digest: bytes) -> list[bytes]:
    """Return the blobs of the corpus; empty if its document is missing. Blocking."""
    corpus = corpus_in(store, digest)
    return [] if corpus is None else [blob for blob, _ in corpus.blobs]


class ExposedCorpus:
    """Exposed part of a folder: the blobs of the run's corpus, or its imported weights. The rest may be private to other
    runs."""

    def __init__(
        self, store: BlobStore, digest: bytes, named: Callable[[BlobStore, bytes], Iterable[bytes]] = blobs_of
    ) -> None:
        """`named`: what the document with that digest names, as soon as it is here."""
        self.store, self.digest, self._named = store, digest, named
        self._names: set[bytes] = {digest}

    def holds(self, digest: bytes) -> bool:
        """Whether the blob is of it, here, and right. Blocking."""
        if digest not in self._names and len(self._names) == 1:
            self._names |= set(self._named(self.store, self.digest))
        return digest in self._names and self.store.sound(digest)


def weights_shelf(store: BlobStore, root: bytes) -> ExposedCorpus:
    """Return the exposed blobs of imported weights."""
    return ExposedCorpus(store, root, BlobStore.stage_digests)


def lacking(store: BlobStore, corpus: Corpus) -> list[bytes]:
    """Return the blobs of the corpus that are missing or damaged. Blocking: reads everything, once per process."""
    return [digest for digest, _ in corpus.blobs if not store.sound(digest)]


def named_store(data: Data, folders: Folders) -> BlobStore | None:
    """The folder that the operator named for the run's data; None where none was named. Raises ConfigError where another corpus
    lies there, or only other names were given."""
    if not folders:
        return None
    if data.name not in folders:
        raise ConfigError(f"the run's data are named {data.name}, not {', '.join(folders)}: use --data {data.name}=DIR")
    folder, digest = folders[data.name], bytes.fromhex(data.digest)
    store = BlobStore(folder, ours=False) if folder.is_dir() else None
    if store is None or corpus_in(store, digest) is None:
        raise ConfigError(
            f"the run's data {data.name} (corpus {data.digest}) are not in {folder}. Pass their folder with "
            f"--data {data.name}=DIR; a node without --data fetches them."
        )
    return store
