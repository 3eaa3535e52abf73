"""Tests of files that open or recover: damage in a daemon's folder ends no daemon, is set aside, and is made or fetched
again."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from dilocox.cli import main as cli
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.outer.state import StageState
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.archive.storage import open_storage
from dilocox.transport.net import tls
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store import files
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile, DamagedError, open_database
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import (
    find_chains,
    find_events,
    leads_out,
    quarantine,
    read_at_most,
    read_named,
    write_atomically,
    write_new,
)
from tests.exchanges import exchange_of
from tests.helpers import Table, digest, identity, manifest
from tests.unit.test_transport import BIG, serving

RUN = manifest()


class Known:
    """A directory that knows these records."""

    def __init__(self, records: dict[str, pb.PeerRecord]) -> None:
        self.records = records

    async def look_up(self, peer: str) -> None:
        pass

    async def find(self, peer: str) -> pb.PeerRecord | None:
        return self.records.get(peer)


def aside(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bad"))}


def test_the_last_of_several_runs_is_the_one_that_was_used_last(tmp_path: Path):
    for number, name in enumerate(("bb", "cc", "aa")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        for file in ("chain.db", "events.db", "chain.db-shm"):
            (run / file).touch()
            os.utime(run / file, (number, number))
    (tmp_path / "runs" / "bb" / "own.db").touch()  # now
    assert [path.parent.name for path in find_chains(tmp_path)] == ["cc", "aa", "bb"]
    assert [path.parent.name for path in find_events(tmp_path)] == ["cc", "aa", "bb"]
    os.utime(tmp_path / "runs" / "cc" / "chain.db-shm")  # a process read it
    assert find_chains(tmp_path)[-1].parent.name == "bb"


def test_what_is_set_aside_overwrites_nothing(tmp_path: Path):
    for text in ("1", "2", "3"):
        (tmp_path / "f").write_text(text)
        quarantine(tmp_path / "f", "test")
    assert aside(tmp_path) == {"f.bad": b"1", "f.2.bad": b"2", "f.3.bad": b"3"}
    assert not (tmp_path / "f").exists()


def test_a_new_file_is_new_or_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_new(tmp_path / "f", b"1", mode=0o600)
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "f", b"2")
    assert (tmp_path / "f").read_bytes() == b"1"
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_new(tmp_path / "g", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("write", [write_new, write_atomically])
def test_a_write_that_fails_names_the_file_that_was_to_be(
    tmp_path: Path, write: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "f", tmp_path / "folder"):
        with pytest.raises(OSError, match=r"directory|exists") as raised:
            write(path, b"1")
        assert raised.value.filename == str(path)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full") as raised:
        write(tmp_path / "f", b"1")
    assert raised.value.filename == str(tmp_path / "f")


@pytest.mark.parametrize("write", [write_new, write_atomically])
def test_what_a_killed_process_of_our_pid_left_is_not_in_the_way(tmp_path: Path, write: Callable[[Path, bytes], None]):
    """Check it, because in a container every restart has the same pid."""
    (tmp_path / f".f.{os.getpid()}.tmp").write_bytes(b"half a")
    write(tmp_path / "f", b"1")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"1"}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"port": "x"}', b'{"dht_port": 70000}', b"\xff\xfe"])
def test_a_damaged_announcement_costs_the_ports(tmp_path: Path, damage: bytes):
    (tmp_path / "daemon.json").write_bytes(damage)
    home = DataDirectory(tmp_path)
    assert home.remembered() == {}
    assert aside(tmp_path) == {"daemon.json.bad": damage}
    home.announce(port=7400, dht_port=7401)
    assert home.remembered()["port"] == 7400
    home.close()


def test_a_damaged_certificate_is_made_again(tmp_path: Path):
    first = tls.load_or_create(tmp_path)
    assert tls.load_or_create(tmp_path) == first
    (tmp_path / "other").mkdir()
    other = tls.load_or_create(tmp_path / "other")
    whole = first.key_pem + first.certificate_pem
    damages = [b"", b"garbage", whole[: len(whole) // 2], other.key_pem + first.certificate_pem, first.certificate_pem]
    for number, damage in enumerate(damages, 1):
        (tmp_path / "tls.pem").write_bytes(damage)
        assert tls.load_or_create(tmp_path) == tls.load_or_create(tmp_path) != first
        assert len(aside(tmp_path)) == number
    assert (tmp_path / "tls.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"\xff" * 32, b"ab", b"zz" * 32])
def test_a_damaged_identity_is_never_made_again(tmp_path: Path, damage: bytes):
    path = tmp_path / "identity.key"
    path.write_bytes(damage)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        DataDirectory(tmp_path)
    assert path.read_bytes() == damage


COMMITS = 5


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Return a closed chain file of a few commits."""
    table = Table(RUN).genesis()
    while len(table.commits) < COMMITS:
        table.contribute().vote()
    kept = ChainFile(tmp_path / "chain.db", RUN)
    for commit in table.commits:
        kept.append(commit.envelope)
    kept.close()
    return tmp_path / "chain.db"


def reopened(path: Path) -> int:
    """Reopen the chain; return how many of its commits are valid. It is writable, and valid from the first on."""
    kept = ChainFile(path, RUN)
    assert len(list(kept.verify())) == kept.length
    kept.close()
    return kept.length


def test_a_chain_that_holds_is_opened_as_it_is(chain: Path):
    assert reopened(chain) == COMMITS
    assert aside(chain.parent) == {}


@pytest.mark.parametrize("number", range(COMMITS))
def test_one_flipped_bit_in_a_stored_commit_costs_the_commits_from_there_on(chain: Path, number: int):
    with closing(sqlite3.connect(chain)) as database:
        (raw,) = database.execute("SELECT envelope FROM commits WHERE round = ?", (number,)).fetchone()
    whole = chain.read_bytes()
    at = whole.index(raw[40:72])  # inside the body: SQLite itself notices nothing
    chain.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    damaged = chain.read_bytes()
    with pytest.raises(LocalError, match="Start its daemon"), ChainFile.for_reading(chain):
        pass
    assert chain.read_bytes() == damaged, "who only reads changes nothing"
    assert reopened(chain) == number
    assert aside(chain.parent) == {"chain.db.bad": damaged}


def test_a_chain_grows_again_after_it_was_healed(chain: Path):
    with closing(sqlite3.connect(chain)) as database:
        envelopes = [raw for (raw,) in database.execute("SELECT envelope FROM commits ORDER BY round")]
        database.execute("DELETE FROM commits WHERE round = 2")
        database.commit()
    kept = ChainFile(chain, RUN)
    assert kept.length == 2
    for raw in envelopes[2:]:
        kept.append(pb.Envelope.FromString(raw))
    kept.close()
    assert reopened(chain) == COMMITS


@pytest.mark.parametrize("damage", ["truncated", "garbage", "header", "pages", "another run", "empty"])
def test_a_chain_file_that_sqlite_cannot_read_is_begun_again(chain: Path, damage: str):
    whole = chain.read_bytes()
    if damage == "another run":
        chain.unlink()
        ChainFile(chain, manifest(run={"name": "other"})).close()
    else:
        chain.write_bytes(
            {
                "truncated": whole[: len(whole) // 2],
                "garbage": b"garbage" * 1000,
                "header": b"\0" * 100 + whole[100:],
                "pages": whole[:4096] + os.urandom(len(whole) - 4096),
                "empty": b"",
            }[damage]
        )
    assert reopened(chain) < COMMITS
    assert reopened(chain) < COMMITS
    assert len(aside(chain.parent)) == 1


@pytest.mark.parametrize("logged", [False, True], ids=["whole", "in its log"])
def test_a_database_that_was_cut_to_nothing_is_not_taken_for_a_new_one(chain: Path, logged: bool):
    """Check it: for a coordinator the run would start again, and its log with all commits would be removed."""
    killed = chain.parent / "killed"
    killed.mkdir()
    if logged:
        with closing(ChainFile(killed / "running.db", RUN)) as kept, closing(ChainFile(chain, RUN)) as whole:
            for commit in whole.commits():
                kept.append(commit.envelope)
            shutil.copy(killed / "running.db-wal", killed / "chain.db-wal")
    (killed / "chain.db").touch()
    with pytest.raises(LocalError, match="empty"), ChainFile.for_reading(killed / "chain.db"):
        pass
    with pytest.raises(DamagedError, match="empty"):
        open_database(killed / "chain.db", check=False)
    again = ChainFile(killed / "chain.db", RUN)
    assert (again.healed, again.length) == ((False, COMMITS) if logged else (True, 0))
    again.close()


def test_a_damaged_log_is_a_sentence(tmp_path: Path):
    (tmp_path / "inputs.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(DamagedError, match="Restore it from a backup"):
        open_database(tmp_path / "inputs.db")
    with pytest.raises(LocalError, match="unable to open"):
        open_database(tmp_path / "none" / "inputs.db")


def rot(store: BlobStore, digest: bytes) -> None:
    raw = bytearray(store.path(digest).read_bytes())
    raw[-1] ^= 1
    store.path(digest).write_bytes(raw)


def test_a_blob_is_read_once_and_a_damaged_one_set_aside(tmp_path: Path):
    BlobStore(tmp_path).put([BIG])
    store = BlobStore(tmp_path)  # another process
    (digest,) = store.digests()
    assert store.sound(digest)
    rot(store, digest)
    assert store.sound(digest), "read again"
    after_restart = BlobStore(tmp_path)
    assert not after_restart.sound(digest)
    assert digest not in after_restart
    assert len(aside(tmp_path)) == 1
    assert after_restart.put([BIG]) == digest
    assert after_restart.sound(digest)


@pytest.mark.parametrize("damage", [b"", b"x" * 32, None])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: bytes | None):
    digest = BlobStore(tmp_path).put([BIG])
    index = BlobStore(tmp_path).path(digest).with_suffix(".index")
    hashes = BlobStore(tmp_path).index(digest)
    index.unlink() if damage is None else index.write_bytes(damage)
    store = BlobStore(tmp_path)
    assert store.sound(digest)
    assert store.index(digest) == hashes


def test_files_that_are_no_blobs_stay_and_harm_nothing(tmp_path: Path):
    store = BlobStore(tmp_path)
    for name in ("notes.part", "x" * 64, ".hidden", "a.tmp"):
        (tmp_path / name).write_text("mine")
    assert store.digests() == set()
    store.sweep(set())
    assert len(list(tmp_path.iterdir())) == 4


async def test_a_blob_that_rotted_is_fetched_again_and_never_served(tmp_path: Path):
    source = BlobStore(tmp_path / "source")
    digest = source.put([BIG])
    (tmp_path / "mine").mkdir()
    mine = BlobStore(tmp_path / "mine")
    mine.put([BIG])
    rot(mine, digest)
    mine = BlobStore(tmp_path / "mine")

    rotten = BlobStore(tmp_path / "rotten")
    rotten.put([BIG])
    rot(rotten, digest)
    channels = ChannelPool()
    bad, good = identity(2).peer, identity(3).peer
    async with (
        serving(tmp_path / "a", BlobStore(tmp_path / "rotten")) as first,
        serving(tmp_path / "b", source) as second,
    ):
        downloader = Downloader(identity(1).peer, mine, Known({bad: first, good: second}), channels)
        with pytest.raises(RemoteError, match="not_found"):
            await downloader.fetch(digest, [bad])
        await downloader.fetch(digest, [bad, good])
    assert BlobStore(tmp_path / "mine").verify(digest)
    assert aside(tmp_path / "rotten"), "its own server noticed"
    await channels.close()


def test_a_list_that_rotted_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check lists of a state's stages, or of a contribution's payloads: garbage ends no process, and one flipped bit names
    no other blob."""
    store = BlobStore(tmp_path)
    states = [digest("state", stage) for stage in range(2)]
    root = store.put([canonical(pb.StageStates(digests=states))])
    assert store.stage_digests(root) == states
    whole = store.path(root).read_bytes()
    for raw in (b"", b"\xff" * len(whole), whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        store.path(root).write_bytes(raw)
        assert store.stage_digests(root) == []
    store.remove(root)
    assert store.stage_digests(root) == store.stage_digests(b"") == []
    for raw in (b"\xff is no list", canonical(pb.StageStates(digests=[b""])), canonical(pb.StageStates(digests=[b"x" * 200]))):
        assert store.stage_digests(store.put([raw])) == [], "who names a root may name any blob"
    starts = exchange_of(RUN, Downloader("me", store, Known({}), ChannelPool())).starts(None)
    leaves = store.put([b"\xff no leaves"])
    large = store.put([bytes(limits.LEAVES_BYTES + 1)])
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("a state is no list, and is not read as one"))
    assert starts.payloads_of(pb.Contribution(leaves=large)) == store.stage_digests(large) == []
    monkeypatch.undo()
    assert (
        starts.payloads_of(pb.Contribution(leaves=leaves)) == starts.payloads_of(pb.Contribution(leaves=digest("gone"))) == []
    )


def test_a_checkpoint_s_words_that_rotted_are_set_aside(tmp_path: Path):
    """Check it, because otherwise the workers would end at every start, and a damaged digit would be announced."""
    state = StageState(RUN, 0)
    metas = [
        BoundaryMeta(round, inner_steps=4, tokens=256, loss=2.5, samples_read=16, joined=1, optimizer_steps=4, rank_or_k=8)
        for round in (3, 4)
    ]
    for meta in metas:
        checkpoint.save_inner(tmp_path, 0, meta.round, {"momentum_buffer|weight": torch.zeros(2)})
        checkpoint.save_outer(tmp_path, state, meta.round)
        checkpoint.seal_boundary(tmp_path, 0, meta)
    assert list(checkpoint.boundaries(tmp_path, 0).values()) == metas
    path = tmp_path / "0000" / "00000004" / "boundary.json"
    whole = path.read_bytes()
    for raw in (b"", b"\xa1" * len(whole), whole[: len(whole) // 2], whole.replace(b'"tokens": 256', b'"tokens": 257')):
        path.write_bytes(raw)
        assert list(checkpoint.boundaries(tmp_path, 0).values()) == metas[:1]
        assert not path.exists()
    newer = json.dumps({**json.loads(whole.partition(b"\n")[2]), "of": "another version"}).encode()
    path.write_bytes(hashlib.sha256(newer).hexdigest().encode() + b"\n" + newer)
    assert list(checkpoint.boundaries(tmp_path, 0).values()) == metas[:1]
    assert len(aside(path.parent)) == 5
    path.write_bytes(whole)
    assert list(checkpoint.boundaries(tmp_path, 0).values()) == metas


@pytest.mark.parametrize("left", [0, 5, 20, -1])
def test_a_checkpoint_s_tensors_that_were_cut_short_are_set_aside(tmp_path: Path, left: int):
    state = StageState(RUN, 0)
    for round in (3, 4):
        checkpoint.save_inner(tmp_path, 0, round, {"momentum_buffer|weight": torch.full((2,), float(round))})
        checkpoint.save_outer(tmp_path, state, round)
        checkpoint.seal_boundary(tmp_path, 0, BoundaryMeta(round, 4, 256, 2.5, 16, 1, 4, 8))
    folder = tmp_path / "0000" / "00000004"
    for name, rounds in ((checkpoint.INNER, {3, 4}), (checkpoint.OUTER, {3})):
        (folder / name).write_bytes((folder / name).read_bytes()[:left])
        assert set(checkpoint.boundaries(tmp_path, 0)) == rounds
        assert float(checkpoint.load_inner(tmp_path, 0, 4)["momentum_buffer|weight"][0]) == 3.0
    assert set(aside(folder)) == {f"{checkpoint.INNER}.bad", f"{checkpoint.OUTER}.bad"}


def test_boundaries_of_a_chain_that_was_given_up_do_not_push_out_new_ones(tmp_path: Path):
    """Reproduce a fault: the run's owner went back to round 11, and each new checkpoint was deleted, because the old ones
    were of later rounds."""

    def seal(round: int) -> set[int]:
        checkpoint.save_outer(tmp_path, StageState(RUN, 0), round, complete=False)
        checkpoint.seal_boundary(tmp_path, 0, BoundaryMeta(round, 4, 256, 2.5, 16, 1, 4, 8))
        return set(checkpoint.boundaries(tmp_path, 0))

    assert [seal(round) for round in (18, 19, 20)][-1] == {19, 20}
    checkpoint.save_inner(tmp_path, 0, 12, {})
    assert [seal(round) for round in (11, 12, 13)] == [{11}, {11, 12}, {12, 13}], "12 was being written beside 11"


def test_a_boundary_goes_on_with_the_inner_tensors_of_the_last_complete_one(tmp_path: Path):
    state = StageState(RUN, 0)

    def seal(round: int) -> set[int]:
        if complete := round % 4 == 0:
            checkpoint.save_inner(tmp_path, 0, round, {"momentum_buffer|weight": torch.full((2,), float(round))})
        state.feedback.fill_(round)
        state.anchor.fill_(-round)
        checkpoint.save_outer(tmp_path, state, round, complete)
        checkpoint.seal_boundary(tmp_path, 0, BoundaryMeta(round, 4, 256, 2.5, 16, 1, 4, 8))
        return set(checkpoint.boundaries(tmp_path, 0))

    assert [seal(round) for round in range(3, 10)] == [{3}, {3, 4}, {4, 5}, {4, 5, 6}, {4, 6, 7}, {4, 7, 8}, {8, 9}]
    checkpoint.save_inner(tmp_path, 0, 12, {"momentum_buffer|weight": torch.zeros(2)})  # killed before it was sealed
    for round, inner, anchor in ((8, 8, -8.0), (9, 8, 7.0), (13, 8, None), (7, None, None)):
        tensors = checkpoint.load_inner(tmp_path, 0, round)
        assert [float(each[0]) for each in tensors.values()] == ([] if inner is None else [inner])
        if anchor is not None:
            state.anchor.fill_(7.0)
            checkpoint.load_outer(tmp_path, state, round)
            assert (float(state.feedback[0]), float(state.anchor[0])) == (round, anchor)


def test_a_boundary_that_was_never_sealed_pushes_out_none(tmp_path: Path):
    """Reproduce a fault: it replaced a whole one, and its moments the last whole ones, so none was left after two crashes."""
    state = StageState(RUN, 0)
    for round in (4, 6, 7, 10):
        if round == 4:
            checkpoint.save_inner(tmp_path, 0, round, {"momentum_buffer|weight": torch.full((2,), 4.0)})
        if round == 10:
            checkpoint.save_inner(tmp_path, 0, 8, {"momentum_buffer|weight": torch.zeros(2)})  # killed before it was sealed
        checkpoint.save_outer(tmp_path, state, round, complete=round == 4)
        checkpoint.seal_boundary(tmp_path, 0, BoundaryMeta(round, 4, 256, 2.5, 16, 1, 4, 8))
    assert set(checkpoint.boundaries(tmp_path, 0)) == {4, 7, 10}
    assert float(checkpoint.load_inner(tmp_path, 0, 10)["momentum_buffer|weight"][0]) == 4.0
    assert not (tmp_path / "0000" / "00000008").exists()


async def test_a_boundary_whose_payload_or_state_rotted_is_not_resumed(chain: Path, tmp_path: Path):
    kept = ChainFile(chain, RUN)
    for rotten in (None, "payload", "state", "chain"):
        blobs = BlobStore(tmp_path / f"blobs {rotten}")
        payload, state = blobs.put([b"a payload"]), blobs.put([b"a state"])
        if rotten in ("payload", "state"):
            rot(blobs, payload if rotten == "payload" else state)
        opening = kept.commit(3)
        assert opening is not None
        payloads = [worker.StagePayload(stage=0, base_state=state, digest=payload)]
        boundary = worker.Boundary(round=4, payloads=payloads, head=b"" if rotten == "chain" else opening.digest)
        store = BlobStore(blobs.folder)  # another process
        alone = Downloader(identity(1).peer, store, Known({}), ChannelPool())
        starts = exchange_of(RUN, alone).starts(kept)
        hello = starts.sound(worker.Hello(rank=0, stages=[0], boundaries=[boundary]))
        found = {candidate.start.origin: candidate.start for candidate in starts.candidates([hello], False)}
        assert (worker.Start.ORIGIN_BOUNDARY in found) == (rotten in (None, "state"))
        assert worker.Start.ORIGIN_INITIAL in found
        other = worker.Boundary(round=4, payloads=payloads, head=boundary.head, inner_steps=7)
        mixed = starts.candidates([hello, worker.Hello(rank=1, stages=[0], boundaries=[other])], False)
        assert worker.Start.ORIGIN_BOUNDARY not in {each.start.origin for each in mixed}, "they were not together in that phase"
        if rotten is None:
            assert await starts.have(found[worker.Start.ORIGIN_BOUNDARY], lambda why: None) == []
        if rotten == "state":
            with pytest.raises(RemoteError, match=r"^unavailable: .*peer"):
                await starts.have(found[worker.Start.ORIGIN_BOUNDARY], lambda why: None)
    kept.close()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/data/x"),
        OSError(errno.EROFS, "Read-only file system"),
        sqlite3.OperationalError("database or disk is full"),
    ],
)
def test_a_full_or_read_only_disk_is_a_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys):
    def broken() -> None:
        raise error

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 1
    said = capsys.readouterr().err
    assert "error" in said
    assert "--home" in said
    assert "Traceback" not in said


async def test_stages_that_did_not_move_keep_what_they_had(chain: Path, tmp_path: Path):
    """Check stage 1 on another host, without its moments, and stage 0 on its former host."""
    kept, store = ChainFile(chain, RUN), BlobStore(tmp_path / "blobs")
    newest = kept.head.round
    opening = {round: kept.commit(round - 1) for round in range(newest - 2, newest + 1)}

    def boundary(round: int, *stages: int) -> worker.Boundary:
        commit = opening[round]
        assert commit is not None
        payloads = [worker.StagePayload(stage=stage, digest=bytes((stage,)) * 32) for stage in stages]
        return worker.Boundary(
            round=round, head=commit.digest, payloads=payloads, samples_read=round, optimizer_steps=4 * round
        )

    starts = exchange_of(RUN, Downloader(identity(1).peer, store, Known({}), ChannelPool())).starts(kept)
    earlier, before, last = boundary(newest - 2, 0, 1), boundary(newest - 1, 0), boundary(newest, 0)
    both = worker.Hello(rank=0, stages=[0, 2], boundaries=[earlier, before])
    hellos = [both, worker.Hello(rank=1, stages=[1])]

    def keeping(hellos: list[worker.Hello]) -> list[worker.Boundary]:
        found = [each.start for each in starts.candidates(hellos, False)]
        assert worker.Start.ORIGIN_BOUNDARY not in {start.origin for start in found}
        snapshots = [start for start in found if start.origin == worker.Start.ORIGIN_SNAPSHOT]
        kept = [start.HasField("kept") for start in snapshots]
        assert kept == sorted(kept, reverse=True), "who has nothing else begins with nothing"
        assert kept.count(False) == len(starts.candidates(hellos, avoid_boundaries=True)) - 1
        return [start.kept for start in snapshots if start.HasField("kept")]

    one = [worker.Hello(rank=0, stages=[0], boundaries=[before]), worker.Hello(rank=1, stages=[1])]
    assert not starts.undecided(one)
    assert keeping(one) == [before] * len(keeping(one)) != []
    assert keeping(hellos)[0] == earlier, "a phase that not all had sealed was never announced"
    one[0].boundaries.append(last)
    assert starts.undecided(one)
    assert keeping(one) == [], "the open round may still count what was contributed to it: it would be owed twice"
    (first, *_) = (each.start for each in starts.candidates(hellos, False))
    snapshots = [first]
    before = earlier
    await starts.with_commits(snapshots[0])
    closed = kept.commit(before.round)
    assert closed is not None
    assert snapshots[0].boundary_commit.commit == closed.envelope.SerializeToString()
    assert not any(each.start.HasField("kept") for each in starts.candidates(hellos, avoid_boundaries=True))
    whole = [worker.Hello(rank=0, stages=[0, 1], boundaries=[boundary(newest - 1, 0, 1)])]
    assert not any(each.start.HasField("kept") for each in starts.candidates(whole, False)), "none moved"
    kept.close()


def test_a_blob_that_is_cut_short_while_it_is_checked_ends_nobody(tmp_path: Path):
    """Reproduce a fault: it was mapped, and the process died of SIGBUS."""
    store = BlobStore(tmp_path, ours=False)
    whole = bytes(16 << 20)
    digest = store.put([whole])
    over = threading.Event()

    def spoil() -> None:
        while not over.is_set():
            os.truncate(store.path(digest), 0)
            store.path(digest).write_bytes(whole)

    spoiling = threading.Thread(target=spoil)
    spoiling.start()
    try:
        for _ in range(20):
            BlobStore(tmp_path, ours=False).sound(digest)
            store.verify(digest)
    finally:
        over.set()
        spoiling.join()
    assert BlobStore(tmp_path, ours=False).sound(digest)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(kind: str, tmp_path: Path):
    path = tmp_path / "f"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"is a {kind}: "):
        read_at_most(path, 10)
    store = BlobStore(tmp_path / "blobs")
    (store.folder / digest("x").hex()).symlink_to(path)
    assert digest("x") not in store
    assert not store.sound(digest("x"))
    archive = open_storage(str(tmp_path))
    with pytest.raises(RemoteError, match=f"is a {kind}"):
        archive.get("f", 10)


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        read_at_most(tmp_path, 10)


def test_a_link_leads_out_of_its_folder_or_not(tmp_path: Path):
    hub, out = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "out.txt"
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    hub.mkdir(parents=True)
    for target in (tmp_path / "hub" / "blobs" / "1", hub / "inside.txt", out):
        target.write_text("text")
        (hub / f"to-{target.name}").symlink_to(target)
    assert [leads_out(hub / f"to-{name}", hub) for name in ("1", "inside.txt", "out.txt")] == [False, False, True]
    assert leads_out(hub / "to-1", tmp_path / "hub") is False
    assert leads_out(tmp_path / "hub" / "blobs" / ".." / ".." / "out.txt", tmp_path / "hub")


def test_a_byte_order_mark_is_no_part_of_a_named_file(tmp_path: Path):
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfrun")
    assert read_named(tmp_path / "f") == "run"


def test_a_link_on_a_pipe_is_read_until_its_command_ends(tmp_path: Path):
    link = f"dilocox://h.example:1/{'A' * 43}"
    program = "import sys; from pathlib import Path; from dilocox.transport.store.files import read_named; "
    program += "print(read_named(Path(sys.argv[1]), piped=True), end='')"
    for shell in (f"echo '{link}'", f"sleep 0.2; echo '{link}'", f"cat {tmp_path / 'link'}"):
        (tmp_path / "link").write_text(link + "\n")
        command = ["bash", "-c", f'"$@" <({shell})', "bash", sys.executable, "-P", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == link + "\n"
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_named, tmp_path / "pipe", piped=True)
        (tmp_path / "pipe").write_text("late")
        assert reading.result() == "late"


def test_a_pipe_that_gives_nothing_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read_named, pipe, piped=True)
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as writer:
            while not reading.done():
                writer.write(bytes(1 << 16))
        with pytest.raises(ConfigError, match="MiB"):
            reading.result()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="pipe"):
        read_named(pipe, piped=True)
    with pytest.raises(ConfigError, match="FIFO"):
        read_named(pipe)
