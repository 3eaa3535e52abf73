"""A daemon finds its coordinator and its peers again, with the DHT and without."""

import asyncio
import base64
import json
import math
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dilocox.cli.common import HostOption
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError
from dilocox.protocol.ids import JoinLink, Way, host_port
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.net import dht, tls
from dilocox.transport.net.dht import Dht, DhtSettings
from dilocox.transport.net.network import Listen, choose_port, multiaddr, open_network
from dilocox.transport.net.peer_directory import PeerDirectory, cached_records
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import write_atomically
from tests import helpers
from tests.helpers import COORDINATOR, PATIENCE_SECONDS, digest, identity, manifest

OWNER = identity(99)
RUN = manifest(run={"name": "test", "owner": OWNER.key.hex()})


def record(number: int, address: str = "127.0.0.1:1", **fields: Any) -> Statement:
    return seal(identity(number), pb.KIND_PEER_RECORD, RUN.run_id, pb.PeerRecord(address=address, sequence=1, **fields))


class Coordinator(rpc.CoordinatorServicer):
    """Coordinator that answers GetRun."""

    appointment: pb.Envelope | None = None

    def __init__(self, own: Statement) -> None:
        self._own = own

    async def GetRun(self, request, context):
        signed = seal(OWNER, pb.KIND_MANIFEST, RUN.run_id, RUN.canonical_bytes())
        return services.Run(manifest=signed.envelope, coordinator=self._own.envelope, appointment=self.appointment)


@asynccontextmanager
async def serving(folder: Path, signer=COORDINATOR) -> AsyncIterator[JoinLink]:
    """Run a coordinator on a free port; yield its link without a DHT address. `signer` signs its record."""
    folder.mkdir(exist_ok=True)
    certificate = tls.load_or_create(folder)
    server, port = await create_server("127.0.0.1:0", certificate)
    at = f"127.0.0.1:{port}"
    body = pb.PeerRecord(address=at, certificate=certificate.certificate_der, sequence=1)
    answers = Coordinator(seal(signer, pb.KIND_PEER_RECORD, RUN.run_id, body))  # type: ignore[abstract]
    rpc.add_CoordinatorServicer_to_server(answers, server)
    await server.start()
    yield JoinLink(RUN.run_id, COORDINATOR.peer, at, sha256(certificate.certificate_der))
    await server.stop(grace=0)


def directory(folder: Path) -> PeerDirectory:
    """Return a directory over a DHT whose child was never started."""
    settings = DhtSettings(RUN.run_id, identity(1), folder, "/ip4/127.0.0.1/tcp/0", ())
    return PeerDirectory(Dht(settings), identity(1), RUN.run_id, 1)


@pytest.mark.parametrize("spoil", [None, "signer", "statement", "reason"])
async def test_an_answer_is_the_coordinators_to_what_was_said(
    tmp_path: Path, spoil: str | None, monkeypatch: pytest.MonkeyPatch
):
    async def submit(self, request, context):
        about = digest("another") if spoil == "statement" else sha256(request.key, request.body)
        reason: Any = max(pb.Reason.values()) + 1 if spoil == "reason" else pb.REASON_LATE
        body = pb.Answer(statement=about, outcome=pb.OUTCOME_IGNORE, reason=reason, detail="too late")
        return seal(identity(5) if spoil == "signer" else COORDINATOR, pb.KIND_ANSWER, RUN.run_id, body).envelope

    monkeypatch.setattr(Coordinator, "Submit", submit)
    channels = ChannelPool()
    async with serving(tmp_path / "c") as link:
        answer = await CoordinatorLink(link, directory(tmp_path), channels).submit_once(record(1).envelope)
    await channels.close()
    if spoil is not None:
        assert answer is None
    else:
        assert answer is not None
        assert answer[:3] == (Outcome.IGNORE, pb.REASON_LATE, "too late")


async def test_the_link_alone_leads_to_the_coordinator(tmp_path: Path):
    found, channels = directory(tmp_path), ChannelPool()
    async with serving(tmp_path / "c") as link:
        run, _ = await asyncio.wait_for(CoordinatorLink(link, found, channels).run(), PATIENCE_SECONDS)
        assert run == RUN
        assert found.records[COORDINATOR.peer].body.address == link.at, "its signed record is better than the link"
    await channels.close()


async def test_only_whom_the_owner_named_is_followed_to_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    channels, appointed = ChannelPool(), identity(7)
    body = pb.Appointment(term=1, coordinator=appointed.peer, round=0)
    async with serving(tmp_path / "c", appointed) as link:
        theirs = replace(link, coordinator=appointed.peer)
        with pytest.raises(LocalError, match="named"):
            await asyncio.wait_for(CoordinatorLink(theirs, directory(tmp_path / "1"), channels).run(), PATIENCE_SECONDS)
        for pen, named in ((OWNER, True), (appointed, False)):
            word = seal(pen, pb.KIND_APPOINTMENT, RUN.run_id, body).envelope
            monkeypatch.setattr(Coordinator, "appointment", word)
            finding = CoordinatorLink(theirs, directory(tmp_path / f"2 {named}"), channels).run()
            if named:
                _, found = await asyncio.wait_for(finding, PATIENCE_SECONDS)
                assert found is not None
                assert found.body == body
                with pytest.raises(LocalError, match="named"):
                    await asyncio.wait_for(CoordinatorLink(link, directory(tmp_path / "3"), channels).run(), PATIENCE_SECONDS)
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(finding, 2)
    await channels.close()


async def test_a_record_that_is_out_of_date_is_not_the_only_way(tmp_path: Path):
    found, channels = directory(tmp_path), ChannelPool()
    old = pb.PeerRecord(address="127.0.0.1:1", certificate=tls.load_or_create(tmp_path).certificate_der)
    found.learn(seal(COORDINATOR, pb.KIND_PEER_RECORD, RUN.run_id, old))
    async with serving(tmp_path / "c") as link:
        await asyncio.wait_for(CoordinatorLink(link, found, channels).run(), PATIENCE_SECONDS)
    await channels.close()


@pytest.mark.parametrize("what", ["certificate", "record"])
async def test_somebody_else_at_the_address_is_not_believed(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    found, channels = directory(tmp_path), ChannelPool()
    async with serving(tmp_path / "c", COORDINATOR if what == "certificate" else identity(7)) as link:
        if what == "certificate":
            link = JoinLink(link.run_id, link.coordinator, link.at, b"x" * 32)
        looking = asyncio.create_task(CoordinatorLink(link, found, channels).run())
        wanted = "another certificate" if what == "certificate" else "instead of the coordinator"
        await helpers.until(lambda: wanted in caplog.text)
        assert not looking.done(), "it goes on looking"
        looking.cancel()
    assert not found.records
    await channels.close()


def test_records_seen_before_are_a_way_back_and_only_those_that_verify(tmp_path: Path):
    path = tmp_path / "peers.json"
    assert cached_records(path, RUN.run_id) == []
    raw = record(1).envelope.SerializeToString()
    for damage in (b"", b"{", b"[1]", b'{"a": 1}', json.dumps([base64.b64encode(raw[:-1] + b"x").decode()]).encode()):
        path.write_bytes(damage)
        assert cached_records(path, RUN.run_id) == []
        assert not path.exists()
    assert len(list(tmp_path.glob("peers.json*.bad"))) == 5
    path.write_text(json.dumps([base64.b64encode(raw).decode()]))
    assert [item.peer for item in cached_records(path, RUN.run_id)] == [identity(1).peer]


def test_a_coordinator_that_brings_records_of_anybody_fills_no_memory(monkeypatch: pytest.MonkeyPatch):
    """Check the memory between two commits, and without any commit, too."""
    monkeypatch.setattr("dilocox.transport.net.peer_directory.CACHED_RECORDS", 3)
    known = PeerDirectory(None, identity(1), RUN.run_id, 1)
    known.know([identity(2).peer])
    for number in (2, *range(10, 30)):
        known.learn(record(number))
    assert list(known.records) == [identity(number).peer for number in (2, 27, 28, 29)]


async def test_where_a_coordinator_once_was_is_forgotten():
    """Check the memory: its record may change without end."""
    directory = PeerDirectory(None, identity(1), RUN.run_id, 1)
    link = CoordinatorLink(JoinLink(RUN.run_id, COORDINATOR.peer, "127.0.0.1:99", bytes(32)), directory, ChannelPool())

    def moved(sequence: int) -> Statement[pb.PeerRecord]:
        body = pb.PeerRecord(address=f"127.0.0.1:{sequence}", certificate=b"none", sequence=sequence)
        return seal(COORDINATOR, pb.KIND_PEER_RECORD, RUN.run_id, body)

    first = moved(1)
    before = sys.getrefcount(first.body)
    for said in (first, moved(2)):
        directory.learn(said)
        assert await link.submit_once(first.envelope) is None
    after = sys.getrefcount(first.body)
    assert after == before


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["loss", "tokens_per_second"])
async def test_a_number_that_is_none_is_shown_to_nobody(
    tmp_path: Path, field: str, number: float, monkeypatch: pytest.MonkeyPatch
):
    """Reproduce a fault: `/v1/peers` had no answer at all if a coordinator reported an infinite loss."""
    good, bad = services.Presence(peer=identity(2).peer, loss=1.5), services.Presence(peer=identity(3).peer)

    setattr(bad, field, number)

    async def presence(self: object, request: object, context: object) -> services.PresenceList:
        return services.PresenceList(peers=[good, bad])

    monkeypatch.setattr(Coordinator, "GetPresence", presence)
    async with serving(tmp_path) as join:
        link = CoordinatorLink(join, PeerDirectory(None, identity(1), RUN.run_id, 1), ChannelPool())
        assert list((await link.presence()).peers) == [good]


class NobodyThere:
    """DHT that finds no peer."""

    async def find(self, peer: str) -> None: ...


async def test_who_was_looked_up_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilocox.transport.net.peer_directory.LOOKUP_SECONDS", 0.0)
    known, peer = PeerDirectory(NobodyThere(), identity(1), RUN.run_id, 1), "".join(["a", "peer"])  # type: ignore[arg-type]
    before = sys.getrefcount(peer)
    await known.look_up(peer)
    await known.look_up("another")
    assert sys.getrefcount(peer) == before


async def test_the_loop_waits_for_no_disk_where_records_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, loop, threads = tmp_path / "peers.json", threading.current_thread(), list[threading.Thread]()

    def write(path: Path, raw: bytes) -> None:
        threads.append(threading.current_thread())
        write_atomically(path, raw)

    monkeypatch.setattr("dilocox.transport.net.peer_directory.REFRESH_SECONDS", 0.01)
    monkeypatch.setattr("dilocox.transport.net.peer_directory.write_atomically", write)
    known = PeerDirectory(None, identity(1), RUN.run_id, 1)
    known.learn(record(2))
    caching = asyncio.create_task(known.cache_forever(path))
    await helpers.until(lambda: caching.done() or cached_records(path, RUN.run_id))
    caching.cancel()
    assert threads
    assert loop not in threads


async def test_a_dht_that_cannot_listen_is_tried_for_ever_and_others_are_met_when_they_come(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dht, "FIRST_RESTART_SECONDS", 0.1)
    ports = [choose_port(), choose_port()]
    nodes = []
    for number, port in enumerate(ports):
        folder = tmp_path / str(number)
        folder.mkdir()
        other = multiaddr("127.0.0.1", ports[1 - number], identity(1 - number).peer)
        nodes.append(Dht(DhtSettings(RUN.run_id, identity(number), folder, f"/ip4/127.0.0.1/tcp/{port}", [other, "junk"])))
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", ports[0]))
        squatter.listen()
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: publish(nodes[1], 1))
        with pytest.raises(LocalError):
            await nodes[0].publish(record(0))
    await until(lambda: publish(nodes[0], 0))
    await until(lambda: sees(nodes[0], identity(1).peer))
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@asynccontextmanager
async def silent_dht(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Dht, Path]]:
    """Run a DHT whose child writes requests to a file, answers none, and ends at one that contains a marker."""
    child, requests = folder / "child", folder / "requests"
    child.write_text(
        "#!/bin/sh\n"
        """echo '{"up": true}'\n"""
        f'while read -r line; do echo "$line" >> {requests}; case $line in *the-end*) exit;; esac; done\n'
    )
    child.chmod(0o700)
    requests.touch()
    monkeypatch.setattr("dilocox.transport.net.dht.sys.executable", str(child))
    node = Dht(DhtSettings(RUN.run_id, identity(1), folder, "/ip4/127.0.0.1/tcp/0", ()))
    running = asyncio.create_task(node.run())

    async def is_up() -> bool:
        with pytest.raises(LocalError) as told:
            await node.ask({"find": "nobody"}, 0)
        return "does not answer" in str(told.value)

    try:
        await until(is_up)
        yield node, requests
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_who_asks_the_dht_ends_when_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with silent_dht(tmp_path, monkeypatch) as (node, requests):
        directory, peer = PeerDirectory(node, identity(1), RUN.run_id, 1), identity(2).peer
        tasks = [
            asyncio.create_task(directory.publish_forever(lambda: record(1))),
            asyncio.create_task(directory.look_up(peer)),
        ]
        await helpers.until(lambda: "put" in (told := requests.read_text()) and peer in told)
        for task in tasks:
            task.cancel()
        await helpers.until(lambda: all(task.done() for task in tasks) or requests.read_text().count("put") > 1)
        assert all(task.cancelled() for task in tasks)


async def test_who_asks_a_dht_process_that_ends_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with silent_dht(tmp_path, monkeypatch) as (node, _):
        with pytest.raises(LocalError, match="ended"):
            await node.ask({"find": "the-end"}, PATIENCE_SECONDS)


async def test_a_daemon_whose_dht_does_not_come_up_goes_on(tmp_path: Path):
    home, tasks = DataDirectory(tmp_path / "home"), Tasks()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        listen = Listen("127.0.0.1", 0, squatter.getsockname()[1])
        async with AsyncExitStack() as closing, asyncio.timeout(PATIENCE_SECONDS):
            nobody = [multiaddr("127.0.0.1", 1, identity(5).peer)]
            network = await open_network(home, RUN.run_id, listen, "n", tasks, closing, nobody)
            await network.server.start()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tasks.wait(), 4)  # the child has failed by now, and the daemon has not
            assert network.address.endswith(str(network.endpoint.ports["port"]))
            await tasks.close()
    home.close()


async def publish(node: Dht, number: int) -> bool:
    await node.publish(record(number))
    return True


async def sees(node: Dht, peer: str) -> bool:
    return await node.find(peer) is not None


async def until(condition) -> None:
    """Wait until the condition is true and raises nothing."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                if await condition():
                    return
            except LocalError:
                pass
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("host", "address", "dht"),
    [
        ("192.0.2.1", "192.0.2.1:7400", "/ip4/192.0.2.1/tcp/7401/p2p/peer"),
        ("2001:db8::1", "[2001:db8::1]:7400", "/ip6/2001:db8::1/tcp/7401/p2p/peer"),
        ("example.org", "example.org:7400", "/dns4/example.org/tcp/7401/p2p/peer"),
    ],
)
def test_host_port_of_every_family_can_be_dialled(host: str, address: str, dht: str):
    assert host_port(host, 7400) == address
    assert multiaddr(host, 7401, "peer") == dht
    way = Way.parse(address, "A" * 43)
    assert way.endpoint == (host, 7400)


def test_way_of_an_ipv6_address_without_brackets_is_refused():
    with pytest.raises(ValueError, match="brackets"):
        Way.parse("2001:db8::1:7400", "A" * 43)


@pytest.mark.parametrize(("said", "host"), [("[::1]", "::1"), ("::1", "::1"), ("2001:DB8:0::1", "2001:db8::1"), ("a.b", "a.b")])
def test_host_option_takes_ipv6_with_and_without_brackets(said: str, host: str):
    command = typer.Typer()
    taken: list[str] = []

    @command.command()
    def take(host: HostOption = "127.0.0.1") -> None:
        taken.append(host)

    assert CliRunner().invoke(command, ["--host", said]).exit_code == 0
    assert taken == [host]
    for wrong in ("fe80::1%eth0", "[::1]:7400", "::1:7400:zz", "1:2"):
        assert CliRunner().invoke(command, ["--host", wrong]).exit_code == 2, wrong
