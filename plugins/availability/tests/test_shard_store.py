"""Tests of a peer's store of erasure shards: after a crash, with damage, and while serving."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyeclib", reason="pip install ./plugins/availability")

from dilocox.protocol import limits
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.store.blobs import BlobHash, BlobStore, digest_of
from dilocox_availability.shards import Code, check_share
from dilocox_availability.store import ShareStore, make_share, share_bytes
from tests.helpers import PATIENCE_SECONDS, digest

CODE = Code(5, 2)


def shared(folder: Path, blob: bytes, index: int = 3) -> tuple[ShareStore, bytes]:
    """Return a store with this shard of the blob."""
    source, kept = BlobStore(folder / "blobs"), ShareStore(folder / "shares")
    of = source.put([blob])
    kept.add([make_share(source, of, CODE, index, kept.store)])
    return kept, of


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
    assert again.lost == {share.round}, "and it is looked at which"


def test_a_damaged_proof_is_set_aside(tmp_path: Path):
    _, blob = shared(tmp_path, b"a blob of some size")
    (tmp_path / "shares" / "proofs" / "0.pb").write_bytes(b"\0garbage")
    again = ShareStore(tmp_path / "shares")
    assert again.get(blob) is None
    assert not again.store.digests()


def test_a_newer_share_of_a_blob_takes_the_place_of_the_older(tmp_path: Path):
    kept, blob = shared(tmp_path, os.urandom(1000), index=3)
    before = kept.get(blob)
    kept.add([make_share(BlobStore(tmp_path / "blobs"), blob, CODE, 4, kept.store)])
    after = kept.get(blob)
    assert before is not None
    assert after is not None
    assert kept.store.digests() == {after.digest} != {before.digest}
    kept.remove(blob)
    assert not kept.store.digests()
    assert ShareStore(tmp_path / "shares").shares() == []


def test_shares_of_a_batch_whose_bytes_are_gone_are_forgotten_and_the_batch_with_the_last(tmp_path: Path):
    source, kept = BlobStore(tmp_path / "blobs"), ShareStore(tmp_path / "shares")
    blobs = [source.put([os.urandom(1000)]) for _ in range(3)]
    kept.add([make_share(source, blob, CODE, 3, kept.store) for blob in blobs])
    batch = tmp_path / "shares" / "proofs" / "0.pb"
    kept.remove(blobs[0])
    assert batch.exists()
    again = ShareStore(tmp_path / "shares")
    assert {share.blob for share in again.shares()} == set(blobs[1:]), "what was removed does not come back"
    for blob in blobs[1:]:
        again.remove(blob)
    assert not batch.exists()
    again.add([make_share(source, blobs[0], CODE, 3, again.store)])
    assert [share.blob for share in ShareStore(tmp_path / "shares").shares()] == [blobs[0]]


class Slowly(list[services.Share]):
    """List that lets other threads run before each element."""

    def __iter__(self) -> Iterator[services.Share]:
        for share in super().__iter__():
            time.sleep(0)
            yield share


def test_shares_are_looked_at_while_others_are_added(tmp_path: Path):
    """Reproduce a fault: the daemon ended with "dictionary changed size during iteration"."""
    kept, interval = ShareStore(tmp_path), sys.getswitchinterval()
    batches = [Slowly(services.Share(blob=digest("blob", n, i), digest=digest(n, i)) for i in range(2000)) for n in range(2)]
    kept.add(batches[0])
    adding = threading.Thread(target=kept.add, args=(batches[1],))
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        while adding.is_alive():
            for _ in range(100):
                kept.shares()
            adding.join(1e-3)  # the fastest thread gets a lock, and that is this one
    finally:
        sys.setswitchinterval(interval)
        adding.join()
    assert len(kept.shares()) == 4000


def test_a_share_that_came_while_the_one_before_was_found_damaged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check it; no caller waits for the hashing."""
    kept, blob = shared(tmp_path, os.urandom(1000), index=3)
    newer = make_share(BlobStore(tmp_path / "blobs"), blob, CODE, 4, kept.store)
    sound = kept.store.sound
    adding = threading.Thread(target=kept.add, args=([newer],))

    def is_damaged(share: bytes) -> bool:
        if share == newer.digest:
            return sound(share)
        adding.start()
        adding.join(PATIENCE_SECONDS)
        assert not adding.is_alive()
        return False

    monkeypatch.setattr(kept.store, "sound", is_damaged)
    assert kept.get(blob) == newer
    assert not kept.lost
