"""Tests of the writers and readers of an archive, and of a run that starts again from it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.node.archive.archiver import ALONE_LOOKS, check_sealing
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.run_reader import Nobody, open_archived
from dilocox.protocol import limits
from dilocox.protocol.consensus import terms
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.wire.messages import seal
from dilocox.transport.archive.archive import create_archive, open_archive
from dilocox.transport.archive.sealing import make_key
from dilocox.transport.archive.source import ArchivePlace, ArchiveSource
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.appointment_bundle import read_handover, take_over
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory, format_identity
from tests.archived import OWNER, RealTable, archiving, check_whole, real_run
from tests.exchanges import exchange_of
from tests.helpers import Table, digest, identity, manifest

NEW = identity(50)


async def kept(folder: Path, rounds: int = 5, key: Path | None = None, **options: Any) -> tuple[RealTable, Path]:
    """Return a run of `rounds` rounds, and the location of its archive, which was updated in each of the last two."""
    store, place = BlobStore(folder / "blobs"), folder / "archive"
    table = RealTable(real_run(store), store)
    table.genesis().train(rounds - 1)
    for more in (0, 1):
        table.train(more)
        chain = table.file(folder / f"kept-{more}.db")
        archive = create_archive(str(place), table.run.run_id, key)
        archiver = archiving(table.run, archive, chain, store, every=1, **options)
        for _ in range(2):
            assert await archiver.archive_once() == ""
            await archiver.carrier.data([])
            archiver.has_data = True
        assert rounds + more - 1 in archiver.status()["snapshots"]
        chain.close()
    return table, place


# A run that begins again


async def test_a_run_begins_again_from_its_archive_when_everybody_is_gone(tmp_path: Path):
    """Check a start with the owner's key alone: a new coordinator, new peers, the same state, and the next round."""
    table, place = await kept(tmp_path)
    (tmp_path / "run.key").write_bytes(format_identity(OWNER.seed))
    (tmp_path / "run.key").chmod(0o600)
    said = CliRunner().invoke(app, ["owner", "appoint", NEW.peer, str(tmp_path / "run.toml"), "--archive", str(place)])
    assert said.exit_code == 0, said.output
    run, signer = read_handover(tmp_path / "run.chain")
    assert (run, signer) == (table.run, NEW.peer)

    chain = ChainFile(tmp_path / "new.db", run)
    take_over(tmp_path / "run.chain", chain)
    head, root = chain.head, table.commits[5].body.state
    assert (head.round, head.coordinator, head.state) == (5, NEW.peer, root), "the newest agreed state: that of round 5"

    again = Table(run, pen=NEW)
    again.commits = table.commits[:5]
    again.state = round_machine.start(run, head, again.now)
    again.feed(round_machine.Resumed(False))
    strangers = (10, 11)
    wrong = again.submit(again.claim(12, state=digest("a state of its own")))
    assert (wrong.outcome, wrong.reason) == (Outcome.REJECT, pb.REASON_WRONG_BASE)
    for number in strangers:
        assert again.submit(again.claim(number, state=root)).outcome is Outcome.ACCEPT
        again.present(number)
    again.wait(run.rounds.deadline_seconds)
    again.wait(run.rounds.liveness_seconds)
    woken = again.commits[-1].body
    assert (woken.round, woken.state, len(woken.counted)) == (5, root, 0), "the same hash"
    assert again.roster()[-2:] == list(strangers)
    chain.append(again.commits[-1].envelope)
    assert chain.head.state == root
    chain.close()


async def test_who_was_never_here_begins_with_the_state_that_the_owner_named(tmp_path: Path):
    """Check a state that only the archive serves."""
    table, place = await kept(tmp_path)
    (tmp_path / "run.key").write_bytes(format_identity(OWNER.seed))
    (tmp_path / "run.key").chmod(0o600)
    assert (
        CliRunner().invoke(app, ["owner", "appoint", NEW.peer, str(tmp_path / "run.toml"), "--archive", str(place)]).exit_code
        == 0
    )
    chain, store = ChainFile(tmp_path / "node.db", table.run), BlobStore(tmp_path / "node")
    take_over(tmp_path / "run.chain", chain)
    source = ArchiveSource(ArchivePlace(str(place), None), table.run.run_id)
    exchange = exchange_of(table.run, Downloader(identity(10).peer, store, Nobody(), ChannelPool(), archive=source))
    starts = exchange.starts(chain)
    first = starts.candidates([], avoid_boundaries=True)[0]
    assert (first.start.round, first.root) == (5, table.commits[5].body.state)
    start = await starts.complete(first)
    assert start.replays == 0
    await starts.have(start, lambda text: None)
    for state in start.states:
        assert store.read(state.digest) == table.store.read(state.digest)
    chain.close()


def appointing(tmp_path: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["owner", "appoint", NEW.peer, str(tmp_path / "run.toml"), *arguments])
    assert done.exit_code == 2
    return done.output


async def test_what_cannot_begin_again_is_a_sentence(tmp_path: Path):
    table, place = await kept(tmp_path)
    assert "no owner key" in appointing(tmp_path, "--archive", str(place))
    (tmp_path / "run.key").write_bytes(format_identity(identity(7).seed))
    (tmp_path / "run.key").chmod(0o600)
    assert "run.key is not the key" in appointing(tmp_path, "--archive", str(place))
    (tmp_path / "run.key").write_bytes(format_identity(OWNER.seed))
    assert "no complete state before round 3" in appointing(tmp_path, "--archive", str(place), "--round", "3")
    assert "only one of --home and --archive" in appointing(tmp_path, "--archive", str(place), "--home", str(tmp_path))
    archive = open_archive(str(place), None)
    for stage in table.store.stage_digests(table.commits[5].body.state):
        archive.drop(stage)
    assert "no complete" in appointing(tmp_path, "--archive", str(place))
    assert not (tmp_path / "run.chain").exists()


def test_the_chain_comes_before_the_owner(tmp_path: Path):
    """Check that the chain overrides the owner's appointment if it has the state already."""
    store = BlobStore(tmp_path / "blobs")
    table = RealTable(real_run(store), store)
    table.genesis().train(2)

    def word(state: bytes) -> pb.Envelope:
        body = pb.Appointment(term=1, coordinator=NEW.peer, round=table.head.round, head=table.head.digest, state=state)
        return seal(OWNER, pb.KIND_APPOINTMENT, table.run.run_id, body).envelope

    assert terms.appoint(table.run, table.head, word(digest("x"))).state == digest("x"), "nobody has said it yet"
    known = replace(table.head, state=digest("known"))
    assert terms.appoint(table.run, known, word(digest("x"))).state == digest("known")
    for wrong in (b"short", bytes(33)):
        with pytest.raises(RemoteError, match="state is not 32 bytes"):
            terms.appoint(table.run, table.head, word(wrong))


# Reading


async def test_a_dead_run_is_read_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilocox.node.run_reader.RETRY_SECONDS", 0.0)
    key = tmp_path / "archive.key"
    make_key(key)
    table, place = await kept(tmp_path, key=key)
    home = DataDirectory(tmp_path / "reader")
    async with open_archived(ArchivePlace(str(place), key), home, lambda text: None) as reader:
        assert [reader.chain.length, reader.manifest] == [6, table.run]
        assert await reader.state() == 5
        assert await reader.replayable(4) == 4
        await reader.tokenizer()
        with pytest.raises(LocalError, match="the state before round 2"):
            await reader.state(2)
    home.close()


async def test_a_chain_that_was_read_before_says_nothing_of_the_archive(tmp_path: Path):
    _, place = await kept(tmp_path)
    home = DataDirectory(tmp_path / "reader")
    async with open_archived(ArchivePlace(str(place), None), home, lambda text: None) as reader:
        await reader.check_archived()
    newest = max((place / "heads").iterdir())
    segment = json.loads(newest.read_text())["segments"][0]
    shutil.rmtree(place / "blobs" / segment["blob"])
    async with open_archived(ArchivePlace(str(place), None), home, lambda text: None) as reader:
        with pytest.raises(LocalError, match="does not contain the blob"):
            await reader.check_archived()
    home.close()


async def test_an_archive_that_is_not_there_yet_is_asked_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table, place = await kept(tmp_path)
    moved = place.rename(tmp_path / "elsewhere")
    source, store = ArchiveSource(ArchivePlace(str(place), None), table.run.run_id), BlobStore(tmp_path / "node")
    root = table.commits[5].body.state
    with pytest.raises(RemoteError, match=f"no archive in .*{place.name}"):
        await source.fetch(root, store, limits.LEAVES_BYTES)
    moved.rename(place)
    with pytest.raises(RemoteError, match=f"no archive in .*{place.name}"):
        await source.fetch(root, store, limits.LEAVES_BYTES)
    assert await source.states() == {}
    monkeypatch.setattr("dilocox.transport.archive.source.AGAIN_SECONDS", 0.0)
    later = ArchiveSource(ArchivePlace(str(place), None), table.run.run_id)
    assert await later.fetch(root, store, limits.LEAVES_BYTES) > 0
    assert (await later.states())[5] == root


async def test_what_it_lacks_is_not_asked_for_many_times_a_second(tmp_path: Path):
    table, place = await kept(tmp_path)
    source, store = ArchiveSource(ArchivePlace(str(place), None), table.run.run_id), BlobStore(tmp_path / "node")
    with pytest.raises(RemoteError, match=r"^unavailable: .*contain"):
        await source.fetch(digest("x"), store, 10)
    with pytest.raises(RemoteError, match=r"^unavailable: .*request"):
        await source.fetch(digest("x"), store, 10)


async def test_a_damaged_archive_is_nobody_elses_fault(tmp_path: Path):
    """Check that a voter does not attribute the archive's damage to a payload's author."""
    table, place = await kept(tmp_path)
    archive, store = open_archive(str(place), None), BlobStore(tmp_path / "node")
    root = table.commits[5].body.state
    (place / archive.folder(root) / "index").write_bytes(b"something else")
    source = ArchiveSource(ArchivePlace(str(place), None), table.run.run_id)
    with pytest.raises(RemoteError) as caught:
        await source.fetch(root, store, limits.LEAVES_BYTES)
    assert caught.value.reason == pb.REASON_DIGEST_MISMATCH
    downloader = Downloader(identity(10).peer, store, Nobody(), ChannelPool(), archive=source)
    with pytest.raises(RemoteError, match=r"; .* is damaged") as caught:
        await downloader.fetch(root, [identity(1).peer])
    assert caught.value.reason == pb.REASON_UNAVAILABLE


# Keeping


async def test_what_was_begun_and_nobody_serves_any_more_goes(tmp_path: Path):
    """Check the deletion, with the exception of objects that the payload log needs."""
    store = BlobStore(tmp_path / "blobs")
    table = RealTable(real_run(store, rounds={"snapshot_every": 50}), store)
    archive = create_archive(str(tmp_path / "archive"), table.run.run_id, None)
    table.genesis().train(4)
    first, _, last = stages = store.stage_digests(table.commits[4].body.state)
    root = table.commits[4].body.state
    aside = store.read(last)
    store.remove(last)
    chain = table.file(tmp_path / "one.db")
    archiver = archiving(table.run, archive, chain, store)
    assert "the state before round 4 is not archived yet" in await archiver.archive_once()
    head = check_whole(archive, table.run, table.commits)
    assert head is not None
    assert head.coming is not None
    assert (head.coming.round, [stage in archive for stage in stages]) == (4, [True, True, False])
    chain.close()
    table.train(4)
    store.put([aside])
    for stage in store.stage_digests(table.commits[8].body.state)[1:]:
        store.remove(stage)
    chain = table.file(tmp_path / "two.db")
    again = archiving(table.run, create_archive(str(tmp_path / "archive"), table.run.run_id, None), chain, store)
    assert "the state before round 8 is not archived yet" in await again.archive_once()
    fresh = open_archive(str(tmp_path / "archive"), None)
    head = check_whole(fresh, table.run, table.commits)
    assert head is not None
    assert head.coming is not None
    assert head.coming.round == 8
    assert [stage in fresh for stage in stages] == [True, False, False], "the first is of the next state too"
    assert root in fresh, "its list is in the payload log"
    assert first in fresh
    chain.close()


async def test_two_who_write_in_turns_both_say_so(tmp_path: Path):
    """Check that their writes never collide."""
    store = BlobStore(tmp_path / "blobs")
    table, two = RealTable(real_run(store), store), []
    table.genesis()
    for number in range(2):
        archive = create_archive(str(tmp_path / "archive"), table.run.run_id, None)
        chain = table.file(tmp_path / f"{number}.db")
        two.append((archiving(table.run, archive, chain, store, every=1), chain))
    for archiver, _ in two:
        assert "another process" not in await archiver.archive_once(), "the second finds what may be its own of before"
    for first, second in (two, two[::-1], two):
        table.train(1)
        for _, chain in two:
            for commit in table.commits[chain.length :]:
                chain.append(commit.envelope)
        await first[0].archive_once()
        assert "another process" in await second[0].archive_once()
        assert "another process" in await second[0].archive_once(), "it stays so while the other only reads"
    for _ in range(ALONE_LOOKS):
        said = await two[1][0].archive_once()
    assert "another process" not in said, "the other is gone"
    for _, chain in two:
        chain.close()


async def test_only_so_many_states_are_kept_and_payloads_since(tmp_path: Path):
    table, place = await kept(tmp_path, rounds=9, keep=1)
    archive = open_archive(str(place), None)
    head = check_whole(archive, table.run, table.commits)
    assert head is not None
    assert (list(head.states), head.payloads) == ([9], ((9, 9),))
    assert head.length == 10, "the chain stays"


async def test_what_a_run_ends_with_is_kept_whatever_round_it_is(tmp_path: Path):
    store = BlobStore(tmp_path / "blobs")
    table = RealTable(real_run(store, rounds={"count": 4}), store)
    table.genesis().train(2)
    archive = create_archive(str(tmp_path / "archive"), table.run.run_id, None)
    for more, snapshots in ((0, [2]), (2, [2]), (None, [2, 5])):
        if more is None:
            for number in range(3):
                table.submit(table.report(number))
        else:
            table.train(more)
        chain = table.file(tmp_path / f"{more}.db")
        archiver = archiving(table.run, archive, chain, store, every=100)
        assert await archiver.archive_once() == ""
        assert archiver.status()["snapshots"] == snapshots
        assert chain.head.finished == (more is None)
        chain.close()


async def test_what_peers_do_not_serve_is_named(tmp_path: Path):
    store = BlobStore(tmp_path / "blobs")
    table = RealTable(real_run(store), store)
    table.genesis().train(4)
    store.remove(store.stage_digests(table.commits[4].body.state)[1])
    chain = table.file(tmp_path / "kept.db")
    archiver = archiving(table.run, create_archive(str(tmp_path / "archive"), table.run.run_id, None), chain, store)
    assert await archiver.archive_once() == "", "an older state is to be had"
    assert archiver.status()["snapshots"] == [3]
    chain.close()


def test_a_run_that_is_not_public_is_sealed_or_the_operator_says_otherwise(tmp_path: Path):
    owner = identity(1).peer
    private = manifest(admission={"policy": "allow-list", "allow": [owner]})
    hidden = manifest(admission={"public_read": False})
    for run in (private, hidden):
        with pytest.raises(ConfigError, match="--archive-key FILE"):
            check_sealing(run, None, plain=False)
        check_sealing(run, None, plain=True)
        check_sealing(run, tmp_path / "key", plain=False)
    check_sealing(manifest(), None, plain=False)
