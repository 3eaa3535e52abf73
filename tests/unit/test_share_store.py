"""The shares that a peer keeps: what a crash leaves, what is damaged, what is served."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pyeclib", reason="pip install -e '.[availability]'")

from dilocox.protocol import limits
from dilocox.protocol.shares import Code, check_share
from dilocox.transport.blobs import BlobHash, BlobStore, digest_of
from dilocox.transport.shares import ShareStore, make_share, share_bytes

CODE = Code(5, 2)


def shared(folder: Path, blob: bytes, index: int = 3) -> tuple[ShareStore, bytes]:
    """A store that keeps this share of it."""
    source, kept = BlobStore(folder / "blobs"), ShareStore(folder / "shares")
    digest = source.put([blob])
    kept.add(make_share(source, digest, CODE, index, kept.store))
    return kept, digest


def test_a_hash_in_parts_is_the_digest():
    raw = os.urandom(2 * limits.CHUNK_BYTES + 5)
    for size in (0, 5, limits.CHUNK_BYTES, len(raw)):
        hashing = BlobHash()
        for at in range(0, size, 999_999):
            hashing.update(raw[at : min(size, at + 999_999)])
        assert hashing.digest() == digest_of([raw[:size]])


def test_a_share_outlives_its_process_and_proves_itself(tmp_path: Path):
    kept, blob = shared(tmp_path, os.urandom(300_000))
    again = ShareStore(tmp_path / "shares")
    share = again.get(blob)
    assert share is not None
    assert share == kept.get(blob)
    assert check_share(share, blob) == CODE
    assert again.holds(share.digest)
    assert again.store.size(share.digest) == share_bytes(share)
    assert not again.holds(blob)


def test_what_no_proof_names_goes_at_the_next_start(tmp_path: Path):
    kept, blob = shared(tmp_path, b"a blob")
    orphan = kept.store.put([b"of a share whose proof was not written"])
    again = ShareStore(tmp_path / "shares")
    assert orphan not in again.store
    assert again.get(blob) is not None


def test_a_damaged_share_is_not_kept(tmp_path: Path):
    kept, blob = shared(tmp_path, b"a blob of some size")
    share = kept.get(blob)
    assert share is not None
    kept.store.path(share.digest).write_bytes(b"x" * share_bytes(share))
    again = ShareStore(tmp_path / "shares")
    assert again.get(blob) is None
    assert blob not in again, "so that it is made again"


def test_a_damaged_proof_is_set_aside(tmp_path: Path):
    _, blob = shared(tmp_path, b"a blob of some size")
    (tmp_path / "shares" / "proofs" / blob.hex()).write_bytes(b"\0garbage")
    again = ShareStore(tmp_path / "shares")
    assert again.get(blob) is None
    assert not again.store.digests()


def test_a_newer_share_of_a_blob_takes_the_place_of_the_older(tmp_path: Path):
    kept, blob = shared(tmp_path, os.urandom(1000), index=3)
    before = kept.get(blob)
    kept.add(make_share(BlobStore(tmp_path / "blobs"), blob, CODE, 4, kept.store))
    after = kept.get(blob)
    assert before is not None
    assert after is not None
    assert kept.store.digests() == {after.digest} != {before.digest}
    kept.remove(blob)
    assert not kept.store.digests()
    assert ShareStore(tmp_path / "shares").shares() == []
