"""Two chains of one run: whoever meets another one ends, with the proof."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dilocox.node.exchange import Exchange
from dilocox.node.forks import Forks, check_forks, halt
from dilocox.protocol import chain
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport import tls
from dilocox.transport.blobs import BlobStore
from dilocox.transport.callers import Callers
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.heads import HEADER, Heads
from dilocox.transport.rpc import ChannelPool, create_server
from dilocox.transport.serve import PeerService
from dilocox.transport.tasks import Tasks
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

RUN = manifest(rounds={"count": 100})
PATIENCE_SECONDS = 60.0


def other_commit(commit: Statement[pb.Commit]) -> Statement[pb.Commit]:
    """For the same round, by the same coordinator, as good as the first."""
    body = pb.Commit.FromString(commit.envelope.body)
    body.closed_at_ms += 1
    return seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body)


@dataclass
class Peer:
    """What of a node meets others: its chain, its blobs, its calls."""

    number: int
    chain: ChainFile
    store: BlobStore
    tasks: Tasks
    channels: ChannelPool
    forks: Forks
    exchange: Exchange
    record: pb.PeerRecord

    async def ended(self) -> LocalError:
        with pytest.raises(LocalError) as caught:
            await asyncio.wait_for(self.tasks.wait(), PATIENCE_SECONDS)
        return caught.value


class Everybody:
    def __init__(self) -> None:
        self.records: dict[str, pb.PeerRecord] = {}

    async def find(self, peer: str) -> pb.PeerRecord | None:
        return self.records.get(peer)


@asynccontextmanager
async def meeting(folder: Path, *chains: list[Statement[pb.Commit]]):
    """Peers 0, 1, … with these chains, that can dial each other."""
    everybody, peers = Everybody(), []
    async with AsyncExitStack() as closing:
        for number, commits in enumerate(chains):
            home = folder / str(number)
            home.mkdir()
            heads, tasks = Heads(), Tasks()
            closing.push_async_callback(tasks.close)
            file = ChainFile(home / "chain.db", RUN)
            closing.callback(file.close)
            for commit in commits:
                file.append(commit.envelope)
            store, channels = BlobStore(home / "blobs"), ChannelPool(identity(number), RUN.run_id, heads)
            closing.push_async_callback(channels.close)
            certificate = tls.load_or_create(home)
            server, port = await create_server("127.0.0.1:0", certificate)
            service = PeerService(store, Callers(RUN.run_id, certificate.certificate_der), heads=heads)
            service.commit = file.raw
            rpc.add_PeerServicer_to_server(service, server)
            await server.start()
            closing.push_async_callback(server.stop, 0)
            forks = Forks(file, everybody, channels, tasks)
            heads.ours, heads.heard = forks.standing, forks.heard
            exchange = Exchange(RUN, range(2), store, everybody, channels, identity(number).peer, heads)
            record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)
            everybody.records[identity(number).peer] = record
            peers.append(Peer(number, file, store, tasks, channels, forks, exchange, record))
        yield peers


async def test_two_who_hold_different_chains_end_when_one_calls_the_other(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(1)
    genesis, first = table.commits
    async with meeting(tmp_path, [genesis, first], [genesis, other_commit(first)]) as (one, other):
        blob = one.store.put([b"payload"])
        await other.exchange.fetch(blob, [identity(0).peer])
        for peer in (one, other):
            error = await peer.ended()
            proof = peer.chain.path.parent / "fork-1.pb"
            assert str(proof) in str(error)
            assert chain.forked_round(RUN, pb.Fork.FromString(proof.read_bytes())) == 1
            with pytest.raises(LocalError, match="two different commits for round 1"):
                check_forks(RUN, proof.parent)


async def test_who_is_behind_or_ahead_holds_no_other_chain(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(2)
    async with meeting(tmp_path, table.commits[:2], table.commits) as (behind, ahead):
        blobs = [behind.store.put([b"one"]), ahead.store.put([b"two"])]
        await ahead.exchange.fetch(blobs[0], [identity(0).peer])
        await behind.exchange.fetch(blobs[1], [identity(1).peer])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while ahead.forks.comparing or behind.forks.comparing:
                await asyncio.sleep(0.01)
        for peer in (behind, ahead):
            peer.tasks.stop()
            await peer.tasks.wait()  # nothing failed


async def test_a_chain_that_nobody_can_show_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table = Table(RUN).genesis()
    table.train(1)
    async with meeting(tmp_path, table.commits, table.commits[:1]) as (one, liar):
        blob = one.store.put([b"payload"])
        liar.forks.standing = lambda: services.Standing(round=2, head=digest("invented"))
        header = ((HEADER, liar.forks.standing().SerializeToString()),)
        one.forks.heard(identity(1).peer, services.Standing(round=2, head=digest("invented")))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.forks.comparing:
                await asyncio.sleep(0.01)
        assert "proves nothing: not_found" in caplog.text
        stream = rpc.PeerStub(liar.channels.channel(one.record)).Fetch(services.FetchRequest(digest=blob), metadata=header)
        assert (await anext(aiter(stream))).HasField("index")
        stream.cancel()
        one.tasks.stop()
        await one.tasks.wait()
        assert not list(one.chain.path.parent.glob("fork-*"))


async def test_strangers_and_nonsense_make_nobody_compare(tmp_path: Path):
    table = Table(RUN).genesis()
    async with meeting(tmp_path, table.commits) as (one,):
        another = services.Standing(round=1, head=digest("another"))
        one.forks.heard(identity(9).peer, another)  # not on the roster
        one.forks.heard(identity(1).peer, services.Standing(round=2, head=digest("ahead of us")))
        one.forks.heard(identity(1).peer, services.Standing())
        heads = Heads(heard=one.forks.heard)
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
    for second in (first, genesis, forged, elsewhere, pb.Envelope()):
        with pytest.raises(RemoteError):
            halt(RUN, tmp_path, first, second)
    assert not list(tmp_path.iterdir())
    (tmp_path / "fork-1.pb").write_bytes(pb.Fork(first=first, second=forged).SerializeToString())
    check_forks(RUN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["fork-1.pb.bad"], "what proves nothing is set aside"
    assert "round 1" in str(halt(RUN, tmp_path, first, other.envelope))
    with pytest.raises(LocalError):
        check_forks(RUN, tmp_path)
