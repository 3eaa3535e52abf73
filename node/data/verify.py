"""Verification of a corpus on disk, before training. Blocking: reads everything."""

from pathlib import Path

import numpy as np

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import Corpus, Shard, check_fits, check_private
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in, lacking, named_store

__all__ = ["check_corpus", "check_own", "check_shard", "check_whole", "must_bring_own"]

CHECKED = 1 << 22
"""Tokens checked at a time."""


def check_shard(store: BlobStore, corpus: Corpus, shard: Shard) -> None:
    """Raise ConfigError if the blob contains other tokens than the corpus describes: its maker is wrong."""
    digest = bytes.fromhex(shard.digest)
    if store.size(digest) != corpus.size(shard):
        raise ConfigError(
            f"the data are not as their corpus states: shard {shard.digest} does not have {shard.tokens:,} tokens"
        )
    kind = np.dtype(f"<u{corpus.token_bytes}")
    view = store.view(digest)
    tokens = np.frombuffer(view, kind, shard.tokens)
    largest = max(int(tokens[start : start + CHECKED].max()) for start in range(0, len(tokens), CHECKED))
    if largest >= corpus.vocabulary_size:
        raise ConfigError(
            f"the data are not as their corpus states: shard {shard.digest} contains token {largest:,}, of "
            f"{corpus.vocabulary_size:,}"
        )
    if (chat := corpus.chat) is not None:
        masks = np.frombuffer(view, np.uint8, offset=tokens.nbytes).reshape(-1, chat.mask_bytes)
        targets = np.packbits([False] + [True] * chat.sequence_length)  # nothing predicts a row's first token
        step = max(1, CHECKED // chat.mask_bytes)
        if not all((masks[row : row + step] & targets).any(axis=1).all() for row in range(0, len(masks), step)):
            raise ConfigError(
                f"the data are not as their corpus states: shard {shard.digest} has a row without a trained token"
            )


def check_whole(store: BlobStore, digest: bytes) -> Corpus:
    """Raise ConfigError if a part of the corpus is missing, damaged, or not as described."""
    corpus = corpus_in(store, digest)
    damaged = [digest] if corpus is None else lacking(store, corpus)
    if corpus is None or damaged:
        raise ConfigError(
            f"{len(damaged)} files of the corpus in {store.folder} are missing or damaged, such as "
            f"{damaged[0].hex()}. Build or copy it again; a node without --data fetches it from peers."
        )
    for shard in (*corpus.training, *corpus.held_out):
        check_shard(store, corpus, shard)
    return corpus


def check_corpus(manifest: Manifest, folder: Path) -> BlobStore:
    """Raise ConfigError if the folder does not contain the run's whole corpus, or it does not fit the model."""
    store = named_store(manifest.data, {manifest.data.name: folder})
    assert store is not None, "it is named"
    check_fits(manifest, check_whole(store, bytes.fromhex(manifest.data.digest)))
    return store


def must_bring_own(manifest: Manifest, private: Path | None) -> None:
    """Raise ConfigError if a cluster needs private data and has none, or the reverse."""
    if manifest.data.private and private is None:
        raise ConfigError(
            "the run's data are private: build a corpus of this cluster with the run's tokenizer "
            "(`dilocox data build`) and pass --private DIR"
        )
    if private is not None and not manifest.data.private:
        raise ConfigError("remove --private: the run trains on shared data, not on private data")


def check_own(manifest: Manifest, shared: Corpus, folder: Path, digest: bytes) -> None:
    """Raise ConfigError if a cluster's private corpus is not whole, or does not fit the run."""
    check_private(manifest, shared, check_whole(BlobStore(folder, ours=False), digest))
