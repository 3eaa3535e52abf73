"""Tests of several coordinators behind real gRPC, over the fake store: a standby learns the leader, also after the store
lost its data."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.daemon import make_link
from dilocox.coordinator.frontend import CoordinatorFrontend
from dilocox.coordinator.kv_store import StoreError
from dilocox.coordinator.leadership import Leadership, campaign, lead_alone, write_down_store
from dilocox.coordinator.service import Contacts, CoordinatorService
from dilocox.coordinator.shared_log import COMMITS_KEPT, LEASE_SECONDS, Candidate, DeposedError
from dilocox.node.attest.verify import appraise
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import JoinLink, Way
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import open_envelope
from dilocox.transport.net import tls
from dilocox.transport.net.network import Listen, Network, choose_port, open_network
from dilocox.transport.net.peer_directory import PeerDirectory, is_overtaken, life_of
from dilocox.transport.net.rpc import ChannelPool, record_of
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from tests.fake_store import FakeStore
from tests.helpers import COORDINATOR, Table, identity, manifest, until

RUN = manifest(rounds={"count": 40})


class Line:
    """Link to the store; `cut`: no message arrives."""

    def __init__(self, world: "World") -> None:
        self._world, self.cut = world, False

    def __getattr__(self, call: str) -> Callable[..., Any]:
        async def ask(*arguments: Any) -> Any:
            if self.cut and call != "close":
                raise StoreError("cut")
            return await getattr(self._world.store, call)(*arguments)

        return ask


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.store = FakeStore(lambda: self.now)
        self.lines: list[Line] = []

    label, prefix = "fake://test", "test"

    def open(self) -> Line:
        """Return a connection to the store, as coordinator.store.StorePlace."""
        self.lines.append(Line(self))
        return self.lines[-1]


class Coordinator:
    """Coordinator as daemon.py composes one, without a DHT and an API."""

    def __init__(self, world: World, name: str, life: int, alone: bool = False, port: int = 0) -> None:
        self.world, self.name, self.alone, self.port = world, name, alone, port
        self.folder = world.folder / name
        self.folder.mkdir(exist_ok=True)
        (self.folder / "starts").write_text(str(life - 1))
        self.desk, self.says = CoordinatorFrontend(), list[str]()
        self.service: CoordinatorService | None = None
        self.network: Network | None = None
        self.line: Line | None = None
        self.chain = ChainFile(self.folder / "chain.db", RUN)

    @property
    def way(self) -> Way:
        """Return the address of one that starts later, with its earlier port."""
        address = self.network.address if self.network is not None else f"127.0.0.1:{self.port}"
        return Way(address, sha256(tls.load_or_create(self.folder).certificate_der))

    @property
    def life(self) -> int:
        assert self.desk.record is not None
        return life_of(self.desk.record.body)

    def watched(self) -> bool:
        return self.service is not None and bool(self.service.watchers)

    async def start(self) -> None:
        self.running = asyncio.create_task(self._live())
        await until(lambda: self.network is not None or self.running.done())

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        self.chain.close()

    async def _live(self) -> None:
        tasks = Tasks()
        async with AsyncExitStack() as closing:
            home = DataDirectory(self.folder, COORDINATOR)
            closing.callback(home.close)
            listen = Listen("127.0.0.1", self.port, 0, dht=False)
            self.network = network = await open_network(
                home, RUN.run_id, listen, self.name, tasks, closing, on_record=self.desk.learn_own_record, publish=self.alone
            )
            rpc.add_CoordinatorServicer_to_server(self.desk, network.server)
            office = await self._office(home, network, tasks, closing)
            contacts = Contacts(network.callers, network.directory)
            signed = pb.Envelope()
            self.service = CoordinatorService(COORDINATOR, self.chain, signed, appraise, rounds=office.log, contacts=contacts)
            self.service.resume()
            office.open(self.service)
            await tasks.wait()

    async def _office(self, home: DataDirectory, network: Network, tasks: Tasks, closing: AsyncExitStack) -> Leadership:
        if self.alone:
            return await lead_alone(home, self.chain, network, self.desk)
        says = self.says.append

        def told(others: Sequence[Candidate]) -> None:
            self.desk.link = make_link(RUN, home, network, others)

        return await campaign(self.world, self.name, home, self.chain, network, self.desk, tasks, closing, says, told, False)


class Node:
    """Follows the run."""

    def __init__(self, *ways: Way, directory: PeerDirectory | None = None) -> None:
        self.directory = directory or PeerDirectory(None, identity(1), RUN.run_id, 1)
        self.channels = ChannelPool(identity(1), RUN.run_id)
        first, *others = ways
        link = JoinLink(RUN.run_id, COORDINATOR.peer, first.at, first.certificate, (), tuple(others))
        self.link = CoordinatorLink(link, self.directory, self.channels)
        self.events: list[services.WatchEvent] = []
        self.following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for event in self.link.watch(lambda: 0):
            self.events.append(event)

    async def stop(self) -> None:
        self.following.cancel()
        await asyncio.wait([self.following])
        await self.channels.close()


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


@asynccontextmanager
async def started(world: World, name: str, life: int = 100) -> AsyncIterator[Coordinator]:
    async with up(Coordinator(world, name, life)) as coordinator:
        coordinator.line = world.lines[-1]
        yield coordinator


@asynccontextmanager
async def up(coordinator: Coordinator) -> AsyncIterator[Coordinator]:
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.stop()


@asynccontextmanager
async def following(*ways: Way, directory: PeerDirectory | None = None) -> AsyncIterator[Node]:
    node = Node(*ways, directory=directory)
    try:
        yield node
    finally:
        await node.stop()


async def test_who_was_elected_last_is_followed_though_the_one_before_hangs(world: World):
    async with started(world, "one") as one:
        await until(lambda: one.service)
        async with started(world, "two") as two, following(one.way, two.way) as node:
            await until(one.watched)
            assert one.line is not None
            one.line.cut = True  # it does not know that it leads no more, and its server answers
            await until(lambda: two.says)
            world.now += LEASE_SECONDS + 1
            await until(two.watched)
            assert two.life > one.life
            await until(lambda: not one.watched())
            await until(lambda: node.link.connected)


@pytest.mark.parametrize("life", [3, 100], ids=["lower", "the same"])
async def test_the_only_leader_is_followed_after_the_store_forgot_all(world: World, life: int):
    """Check its incarnation: another one had the same number, and nodes know a record with it."""
    async with started(world, "one", life=100) as one, started(world, "two", life=life) as two:
        await until(lambda: one.service)
        async with following(one.way, two.way) as node:
            await until(one.watched)
            await one.stop()
            world.store.forget()
            await until(two.watched)
            assert two.life > 100
            await until(lambda: sha256(node.directory.records[COORDINATOR.peer].body.certificate) == two.way.certificate)


async def test_a_coordinator_that_goes_on_alone_is_followed_and_heard_of(world: World):
    """Check a start while no other coordinator runs: of two leaders a node follows the one that received the other's
    record last."""
    two = Coordinator(world, "two", 3, alone=True, port=choose_port())
    async with started(world, "one", life=100) as one:
        await until(lambda: one.service)
        async with following(one.way, two.way) as node:
            await until(one.watched)
            await one.stop()
            async with up(two):
                await until(two.watched)
                await until(lambda: life_of(node.directory.records[COORDINATOR.peer].body) == two.life)
                assert two.life > 100


async def test_a_leader_that_was_overtaken_is_refused_by_who_knows_it(world: World):
    """Check it also without any other answer; it cannot raise its number, because the store reports that it no longer
    leads."""
    async with started(world, "one") as one:
        await until(lambda: one.service)
        async with started(world, "two") as two:
            assert one.line is not None
            one.line.cut = True
            await until(lambda: two.says)
            world.now += LEASE_SECONDS + 1
            await until(lambda: two.service)
            async with following(two.way, one.way) as node:
                await until(two.watched)
                await two.stop()
                await until(lambda: not node.link.connected)
                events = len(node.events)
                opened: list[str] = []
                service = one.service
                assert service is not None
                follow = service.follow

                def follows(request: services.WatchRequest, caller: str, address: str) -> Any:
                    opened.append(caller)
                    return follow(request, caller, address)

                service.follow = follows  # type: ignore[method-assign]
                await until(lambda: len(opened) > 2 or len(node.events) > events)
                assert len(node.events) == events
                assert not node.link.connected
                before = one.life
                one.line.cut = False
                await until(lambda: one.running.done())
                assert isinstance(one.running.exception(), DeposedError)
                assert one.life == before


async def test_only_a_record_of_the_coordinator_s_own_raises_its_number(world: World):
    async with started(world, "one", life=100) as one:
        await until(lambda: one.service)
        before, channels = one.life, ChannelPool(identity(1), RUN.run_id)
        stub = rpc.ElectionStub(channels.channel(await record_of(one.way)))
        for signer, life in ((identity(1), before), (COORDINATOR, 5001)):
            shown = PeerDirectory(None, signer, RUN.run_id, 5000).seal_record("192.0.2.1:1", b"c", "", ())
            reply: services.LeadReply = await stub.Await(services.LeadRequest(newest=shown.envelope))
            record = open_envelope(reply.record, RUN.run_id, (pb.KIND_PEER_RECORD,))
            assert (record.peer, life_of(record.body)) == (COORDINATOR.peer, life)
        await channels.close()


async def test_who_was_away_for_long_asks_the_leader_for_commits(world: World):
    table = Table(RUN).genesis().train(COMMITS_KEPT + 4)
    one = Coordinator(world, "one", 100)
    for commit in table.commits:
        one.chain.append(commit.envelope)
    await one.start()
    try:
        await until(lambda: one.service)
        async with started(world, "two") as two:
            await until(lambda: two.chain.length == len(table.commits))
            await until(lambda: any("one at" in says for says in two.says))
    finally:
        await one.stop()


async def test_who_stands_by_says_who_leads(world: World):
    async with started(world, "one") as one, started(world, "two") as two:
        await until(lambda: one.service)
        await until(lambda: "one at" in two.desk.says)
        assert two.service is None


async def test_a_standby_names_the_leader_to_a_node_with_an_old_link(world: World):
    """Check a node that knows only the standby, and has no DHT."""
    async with started(world, "one") as one, started(world, "two") as two:
        await until(lambda: one.service)
        await until(lambda: two.desk.link)
        async with following(two.way) as node:
            await until(one.watched)
            await until(lambda: node.link.connected)


@pytest.mark.parametrize("kind", ["this run's", "another run's", "another coordinator's", "malformed"])
async def test_only_a_link_of_this_run_adds_addresses(world: World, kind: str):
    async with started(world, "one") as one, started(world, "two") as two:
        await until(lambda: one.service)
        await until(lambda: two.desk.link)
        run_id = bytes(32) if kind == "another run's" else RUN.run_id
        peer = identity(2).peer if kind == "another coordinator's" else COORDINATOR.peer
        two.desk.link = "dilocox://" if kind == "malformed" else JoinLink(run_id, peer, *one.way)  # type: ignore[assignment]
        async with following(two.way) as node:
            node.following.cancel()
            answers = [await node.link.submit_once(pb.Envelope()) for _ in range(3)]
            assert any(answers) == (kind == "this run's")


def test_a_folder_that_shared_its_rounds_does_not_start_alone(tmp_path: Path):
    assert not write_down_store(tmp_path, None)
    assert not write_down_store(tmp_path, World(tmp_path))
    assert write_down_store(tmp_path, World(tmp_path))
    with pytest.raises(ConfigError, match="pass --store"):
        write_down_store(tmp_path, None)


def test_a_life_gives_way_to_one_with_a_higher_number():
    def record(sequence: int, certificate: bytes) -> pb.PeerRecord:
        return pb.PeerRecord(sequence=sequence, certificate=certificate)

    one, later = record(7 << 24, b"1"), record((7 << 24) + 5, b"1")
    assert not is_overtaken(one, later)
    assert not is_overtaken(later, one)
    assert is_overtaken(one, record(8 << 24, b"2"))
    assert not is_overtaken(record(8 << 24, b"2"), one)
    assert is_overtaken(one, record(7 << 24, b"2")), "who cannot be told apart gives way"
