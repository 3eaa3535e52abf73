"""Tests of two chains of one run: a peer that receives another chain ends, with the proof."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.exchange.forks import check_forks, is_ours, proof_of_fork
from dilocox.protocol.consensus import terms
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.limits.head_gossip import HEADER, HeadGossip
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.files import write_atomically
from tests.helpers import COORDINATOR, Table, digest, identity, manifest
from tests.peers import PATIENCE_SECONDS, meeting

RUN = manifest(rounds={"count": 100})


def other_commit(commit: Statement[pb.Commit]) -> Statement[pb.Commit]:
    """Return a commit for the same round, by the same coordinator, as valid as the first."""
    body = pb.Commit.FromString(commit.envelope.body)
    body.closed_at_ms += 1
    return seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body)


async def test_two_who_hold_different_chains_end_when_one_calls_the_other(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(1)
    genesis, first = table.commits
    async with meeting(tmp_path, RUN, [genesis, first], [genesis, other_commit(first)]) as (one, other):
        blob = one.store.put([b"payload"])
        await other.exchange.downloader.fetch(blob, [identity(0).peer])
        for peer in (one, other):
            error = await peer.ended()
            proof = peer.chain.path.parent / "fork-1.pb"
            assert str(proof) in str(error)
            assert terms.forked_round(RUN, pb.Fork.FromString(proof.read_bytes())) == (1, 0)
            with pytest.raises(LocalError, match="two different commits for round 1"):
                check_forks(peer.chain)


async def test_who_is_behind_or_ahead_holds_no_other_chain(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(2)
    async with meeting(tmp_path, RUN, table.commits[:2], table.commits) as (behind, ahead):
        blobs = [behind.store.put([b"one"]), ahead.store.put([b"two"])]
        await ahead.exchange.downloader.fetch(blobs[0], [identity(0).peer])
        await behind.exchange.downloader.fetch(blobs[1], [identity(1).peer])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while ahead.forks.comparing or behind.forks.comparing:
                await asyncio.sleep(0.01)
        for peer in (behind, ahead):
            peer.tasks.stop()
            await peer.tasks.wait()  # nothing failed


async def test_a_chain_that_nobody_can_show_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table = Table(RUN).genesis()
    table.train(1)
    async with meeting(tmp_path, RUN, table.commits, table.commits[:1]) as (one, liar):
        blob = one.store.put([b"payload"])
        liar.forks.tip = lambda: services.Tip(round=2, head=digest("invented"))  # type: ignore[method-assign]
        header = ((HEADER, liar.forks.tip().SerializeToString()),)
        one.forks.heard(identity(1).peer, services.Tip(round=2, head=digest("invented")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.forks.comparing:
                await asyncio.sleep(0.01)
        assert "proves nothing: not_found" in caplog.text
        stream = rpc.PeerStub(liar.channels.channel(one.record)).Fetch(services.FetchRequest(digest=blob), metadata=header)
        assert (await anext(aiter(stream))).HasField("index")
        stream.cancel()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.forks.comparing:
                await asyncio.sleep(0.01)
        one.tasks.stop()
        await one.tasks.wait()
        assert not list(one.chain.path.parent.glob("fork-*"))


async def test_strangers_and_nonsense_make_nobody_compare(tmp_path: Path):
    table = Table(RUN).genesis()
    async with meeting(tmp_path, RUN, table.commits) as (one,):
        another = services.Tip(round=1, head=digest("another"))
        one.forks.heard(identity(9).peer, another)  # not on the roster
        one.forks.heard(identity(1).peer, services.Tip(round=2, head=digest("ahead of us")))
        one.forks.heard(identity(1).peer, services.Tip())
        heads = HeadGossip()
        heads.open(one.forks)
        heads.take(identity(1).peer, ((HEADER, b"\xff\xff"), (HEADER, "text"), ("other", b"")))
        heads.take(identity(1).peer, None)
        assert not one.forks.comparing
        one.forks.heard(identity(1).peer, another)
        assert one.forks.comparing == {identity(1).peer}


def test_only_two_commits_of_one_round_by_the_coordinator_are_a_proof(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(1)
    genesis, first = (commit.envelope for commit in table.commits)
    other = other_commit(table.commits[1])
    forged = seal(identity(1), pb.KIND_COMMIT, RUN.run_id, other.body).envelope
    elsewhere = seal(COORDINATOR, pb.KIND_COMMIT, digest("another run"), other.body).envelope
    file = ChainFile(tmp_path / "chain.db", RUN)
    for commit in table.commits:
        file.append(commit.envelope)
    for second in (first, genesis, forged, elsewhere, pb.Envelope()):
        with pytest.raises(RemoteError):
            proof_of_fork(file, 1, second)
    assert not list(tmp_path.glob("fork-*"))
    for nonsense in (pb.Fork(first=first, second=forged).SerializeToString(), b"\xff\xff"):
        (tmp_path / "fork-1.pb").write_bytes(nonsense)
        check_forks(file)
        assert [path.name for path in tmp_path.glob("fork-*")] == ["fork-1.pb"], "who verifies changes nothing"
    assert "round 1" in str(proof_of_fork(file, 1, other.envelope))
    with pytest.raises(LocalError):
        check_forks(file)
    file.close()


async def test_the_loop_waits_for_no_disk_where_a_commit_is_compared_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table = Table(RUN).genesis()
    table.train(1)
    file, loop = ChainFile(tmp_path / "chain.db", RUN), threading.current_thread()
    for commit in table.commits[:1]:
        file.append(commit.envelope)
    used: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert threading.current_thread() is not loop
            used.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(file, "commit", watched("read", file.commit))
    monkeypatch.setattr("dilocox.node.exchange.forks.write_atomically", watched("written", write_atomically))
    assert not await is_ours(file, table.commits[1])
    assert await is_ours(file, table.commits[0])
    with pytest.raises(LocalError, match="two different commits for round 0"):
        await is_ours(file, other_commit(table.commits[0]))
    assert used[-1] == "written"
    with pytest.raises(LocalError, match="for round 0"):
        check_forks(file)
    file.close()
