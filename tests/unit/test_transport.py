"""Blobs on disk and over pinned TLS gRPC, the parent pipe, the data directory."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net import dht_child, tls
from dilocox.transport.net import rpc as transport_rpc
from dilocox.transport.net.blob_server import PeerService
from dilocox.transport.net.dht import Dht, DhtSettings
from dilocox.transport.net.rpc import ChannelPool, allow_open_files, create_server, fetch_blob
from dilocox.transport.process.health import running_daemon
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox.transport.store.blobs import BlobStore, PartialBlob, blob_digest, digest_of
from dilocox.transport.store.data_directory import DataDirectory, load_identity
from dilocox.transport.store.files import write_atomically
from tests import helpers

BIG = os.urandom(2 * limits.CHUNK_BYTES + 12345)


def store(tmp_path: Path, name: str) -> BlobStore:
    return BlobStore(tmp_path / name)


def test_a_digest_depends_on_the_bytes_not_on_how_they_come(tmp_path: Path):
    blobs = store(tmp_path, "a")
    digest = blobs.put([BIG])
    assert digest == digest_of([BIG[:100], memoryview(BIG)[100:5_000_000], BIG[5_000_000:]])
    assert digest in blobs
    assert blobs.verify(digest)
    assert digest != digest_of([BIG + b"\0"])
    assert store(tmp_path, "b").put([]) == blob_digest(0, [])


def test_a_flipped_bit_on_disk_is_found(tmp_path: Path):
    blobs = store(tmp_path, "a")
    digest = blobs.put([BIG])
    raw = bytearray(BIG)
    raw[-1] ^= 1
    blobs.path(digest).write_bytes(raw)
    assert not blobs.verify(digest)


def test_a_download_resumes_at_the_first_chunk_it_lacks(tmp_path: Path):
    source, target = store(tmp_path, "a"), store(tmp_path, "b")
    digest = source.put([BIG])
    hashes = source.index(digest)
    partial = PartialBlob(target, digest, len(BIG), hashes)
    partial.feed(BIG[: limits.CHUNK_BYTES + 10])
    assert partial.next_chunk == 1
    with target.path(digest).with_suffix(".part").open("ab") as torn:
        torn.write(b"what a crash left")
    resumed = PartialBlob(target, digest, len(BIG), hashes)
    assert resumed.next_chunk == 1
    resumed.feed(BIG[limits.CHUNK_BYTES :])
    assert resumed.complete
    resumed.finish()
    assert target.path(digest).read_bytes() == BIG
    assert target.index(digest) == hashes


def test_wrong_bytes_are_refused_and_the_right_ones_kept(tmp_path: Path):
    source, target = store(tmp_path, "a"), store(tmp_path, "b")
    digest = source.put([BIG])
    hashes = source.index(digest)
    partial = PartialBlob(target, digest, len(BIG), hashes)
    partial.feed(BIG[: limits.CHUNK_BYTES])
    with pytest.raises(RemoteError, match="chunk 1"):
        partial.feed(b"\0" * limits.CHUNK_BYTES)
    assert PartialBlob(target, digest, len(BIG), hashes).next_chunk == 1
    for size, wrong in ((len(BIG) + 1, hashes), (len(BIG), hashes[::-1]), (len(BIG), hashes[:1]), (1 << 60, hashes)):
        with pytest.raises(RemoteError):
            PartialBlob(target, digest, size, wrong)


def test_sweeping_removes_what_is_named(tmp_path: Path):
    blobs = store(tmp_path, "a")
    kept, gone = blobs.put([b"kept"]), blobs.put([b"gone"])
    blobs.path(gone).with_suffix(".part").write_bytes(b"x")
    for process in (1, os.getpid()):  # in a container an earlier process had the same number
        (blobs.folder / f".{process}-ab.tmp").write_bytes(b"x")
    blobs.sweep({gone})
    assert blobs.digests() == {kept}
    assert sorted(p.name for p in blobs.folder.iterdir()) == [kept.hex(), kept.hex() + ".index"]


def test_what_this_process_writes_is_not_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check the blob and its temporary file, while their store is swept for the first time."""
    swept, real = [], os.replace

    def replace(scratch: Path, path: Path) -> None:
        store(tmp_path, "a").sweep(set())
        swept.append(path)
        real(scratch, path)

    monkeypatch.setattr("os.replace", replace)
    blobs = store(tmp_path, "a")
    digest = blobs.put([b"kept"])
    blobs.path(digest).with_suffix(".index").unlink()
    assert store(tmp_path, "a").sound(digest)
    index = blobs.path(digest).with_suffix(".index")
    assert swept == [index, blobs.path(digest), index]
    assert sorted(p.name for p in blobs.folder.iterdir()) == [digest.hex(), index.name]


def test_atomic_writes_leave_no_scratch(tmp_path: Path):
    write_atomically(tmp_path / "f", b"1", mode=0o600)
    write_atomically(tmp_path / "f", b"2", mode=0o600)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"2"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


RUN_ID = helpers.digest("run")


class Served:
    """A peer's server on a free port."""

    def __init__(self, folder: Path, service: rpc.PeerServicer) -> None:
        folder.mkdir(exist_ok=True)
        self.certificate = tls.load_or_create(folder)
        self.service: Any = service

    async def __aenter__(self) -> pb.PeerRecord:
        self._server, port = await create_server("127.0.0.1:0", self.certificate, getattr(self.service, "traffic", None))
        rpc.add_PeerServicer_to_server(self.service, self._server)
        await self._server.start()
        return pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=self.certificate.certificate_der)

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(grace=0)


async def test_blobs_travel_over_pinned_tls(tmp_path: Path):
    source, target = store(tmp_path, "a"), store(tmp_path, "b")
    digest, empty = source.put([BIG]), source.put([])
    served = serving(tmp_path / "peer", source)
    async with served as record:
        channels = ChannelPool()
        channel = channels.channel(record)
        assert await fetch_blob(channel, target, digest) == len(BIG)
        assert target.verify(digest)
        assert served.service.bytes_sent >= len(BIG)
        await fetch_blob(channel, target, empty)
        assert target.size(empty) == 0
        with pytest.raises(RemoteError, match="not_found"):
            await fetch_blob(channel, target, b"x" * 32)
        with pytest.raises(RemoteError, match="at most 10"):
            await fetch_blob(channel, store(tmp_path, "c"), digest, max_size=10)
        await channels.close()


async def test_a_fetch_resumes_what_is_on_disk(tmp_path: Path):
    source, target = store(tmp_path, "a"), store(tmp_path, "b")
    digest = source.put([BIG])
    PartialBlob(target, digest, len(BIG), source.index(digest)).feed(BIG[: limits.CHUNK_BYTES])
    async with serving(tmp_path / "peer", source) as record:
        channels = ChannelPool()
        seen: list[tuple[int, int]] = []
        received = await fetch_blob(
            channels.channel(record), target, digest, watch=lambda held, size: seen.append((held, size))
        )
        assert received == len(BIG) - limits.CHUNK_BYTES
        assert target.verify(digest)
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == ((limits.CHUNK_BYTES, len(BIG)), (len(BIG), len(BIG)))
        await channels.close()


async def test_another_certificate_is_not_trusted(tmp_path: Path):
    source = store(tmp_path, "a")
    digest = source.put([b"secret"])
    (tmp_path / "impostor").mkdir()
    other = tls.load_or_create(tmp_path / "impostor")
    async with serving(tmp_path / "peer", source) as record:
        channels = ChannelPool()
        pinned = pb.PeerRecord(address=record.address, certificate=other.certificate_der)
        with pytest.raises(RemoteError, match="unavailable"):
            await fetch_blob(channels.channel(pinned), store(tmp_path, "b"), digest)
        with pytest.raises(RemoteError, match=r"^malformed: .*certificate"):
            channels.channel(pb.PeerRecord(address=record.address, certificate=b"junk"))
        await channels.close()


def serving(folder: Path, source: BlobStore, traffic: Traffic | None = None) -> Served:
    """Serve blobs; every caller is unknown until the service learns the members."""
    folder.mkdir(exist_ok=True)
    callers = CallerAuth(RUN_ID, tls.load_or_create(folder).certificate_der)
    return Served(folder, PeerService(source, callers, traffic))


class Hostile(rpc.PeerServicer):
    """Service that answers with given messages."""

    def __init__(self, replies: list[services.FetchReply]) -> None:
        self._replies = replies

    async def Fetch(self, request, context):
        for reply in self._replies:
            yield reply


async def test_hostile_servers_are_remote_faults(tmp_path: Path):
    source = store(tmp_path, "a")
    digest = source.put([b"good bytes"])
    index = services.FetchReply(index=services.BlobIndex(size=10, chunk_hashes=source.index(digest)))
    other = services.FetchReply(index=services.BlobIndex(size=10, chunk_hashes=[b"h" * 32]))
    data = services.FetchReply(data=b"good bytes")
    stories = [
        [],
        [data],
        [other, data],
        [index],
        [index, services.FetchReply(data=b"evil bytes")],
        [index, services.FetchReply(data=b"good bytes and more")],
        [services.FetchReply(index=services.BlobIndex(size=1 << 62, chunk_hashes=[b"h" * 32] * 1000))],
    ]
    for number, story in enumerate(stories):
        async with Served(tmp_path / "peer", Hostile(story)) as record:  # type: ignore[abstract]
            channels = ChannelPool()
            target = store(tmp_path, f"target-{number}")
            with pytest.raises(RemoteError):
                await fetch_blob(channels.channel(record), target, digest)
            assert digest not in target
            await channels.close()


@pytest.mark.parametrize("limited", ["upload", "download"])
async def test_lines_are_limited_and_counted_by_kind(tmp_path: Path, limited: str):
    source = store(tmp_path, "a")
    digest = source.put([os.urandom(limits.FRAME_BYTES)])
    slow, free = Rates(usual_bytes_per_second=4 * limits.FRAME_BYTES), Rates()
    serves = Traffic(upload=slow if limited == "upload" else free)
    async with serving(tmp_path / "peer", source, serves) as record:
        channels = ChannelPool(traffic=Traffic(download=slow if limited == "download" else free))
        start = asyncio.get_running_loop().time()
        spend = channels.traffic.download.spend
        await fetch_blob(channels.channel(record), store(tmp_path, "b"), digest, spend=spend)
        assert asyncio.get_running_loop().time() - start > 0.2
        await channels.close()
    assert channels.traffic.of("received") == serves.of("sent")
    assert set(channels.traffic.of("received")) == {"blob"}
    assert limits.FRAME_BYTES < channels.traffic.bytes["received", "blob"] < 1.01 * limits.FRAME_BYTES
    assert channels.traffic.of("sent") == serves.of("received")


@pytest.mark.parametrize(
    "spoil", [lambda der: b"", lambda der: b"junk", lambda der: der.replace(b"\x02\x01\x02", b"\x02\x01\x01", 1)]
)
async def test_bytes_that_are_almost_a_certificate_end_nobody(tmp_path: Path, spoil):
    """Reproduce a fault: an unknown peer's record with an invalid X.509 version ended every node that connected to it."""
    der = tls.load_or_create(tmp_path).certificate_der
    spoilt = spoil(der)
    assert spoilt != der
    with pytest.raises(ValueError):  # noqa: PT011
        tls.pem_of(spoilt)
    with pytest.raises(RemoteError, match=r"^malformed: .*certificate"):
        ChannelPool().channel(pb.PeerRecord(address="192.0.2.1:1", certificate=spoilt))


async def test_a_connection_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS", 1)
    async with serving(tmp_path / "peer", store(tmp_path, "a")) as record, asyncio.timeout(helpers.PATIENCE_SECONDS):
        host, _, port = record.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()


async def test_connections_are_bounded_and_leave_room_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CONNECTIONS", 2)
    source = store(tmp_path, "a")
    digest = source.put([b"x"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        allow_open_files(512)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(512, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    async with serving(tmp_path / "peer", source) as record, asyncio.timeout(helpers.PATIENCE_SECONDS):
        pools = [ChannelPool() for _ in range(2)]
        for number, pool in enumerate(pools):
            await fetch_blob(pool.channel(record), store(tmp_path, str(number)), digest)
        one_more = ChannelPool()
        with pytest.raises(RemoteError, match="unavailable"):
            await fetch_blob(one_more.channel(record), store(tmp_path, "third"), digest)
        for pool in (*pools, one_more):
            await pool.close()


async def test_of_many_places_those_asked_longest_ago_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check the limit: each costs memory, and members report their addresses as often as they like."""
    monkeypatch.setattr(limits, "CHANNELS", 2)
    certificate = tls.load_or_create(tmp_path).certificate_der
    places = [pb.PeerRecord(address=f"127.0.0.1:{number}", certificate=certificate) for number in range(1, 4)]
    pool = ChannelPool()
    first, second = (pool.channel(place) for place in places[:2])
    assert pool.channel(places[0]) is first
    third = pool.channel(places[2])
    assert pool.channel(places[0]) is first
    assert pool.channel(places[2]) is third
    with pytest.raises(RemoteError, match=r"^unavailable: .*connections"):
        rpc.PeerStub(second).Fetch(services.FetchRequest())
    assert pool.channel(places[1]) is not second
    await pool.close()


async def test_a_channel_is_not_closed_under_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CHANNELS", 1)
    source = store(tmp_path, "a")
    digest = source.put([BIG])
    async with serving(tmp_path / "peer", source) as record, asyncio.timeout(helpers.PATIENCE_SECONDS):
        pool, elsewhere = ChannelPool(), pb.PeerRecord(address="127.0.0.1:1", certificate=record.certificate)
        channel = pool.channel(record)
        stream = rpc.PeerStub(channel).Fetch(services.FetchRequest(digest=digest))
        assert (await anext(aiter(stream))).index.size == len(BIG)
        pool.channel(elsewhere)
        assert pool.channel(record) is channel
        assert b"".join([reply.data async for reply in stream]) == BIG
        for place in (elsewhere, pb.PeerRecord(address="127.0.0.1:2", certificate=record.certificate)):
            pool.channel(place)
        assert pool.channel(record) is not channel, "its call has ended"
        await pool.close()


def test_the_identity_is_private(tmp_path: Path):
    path = tmp_path / "identity.key"
    first = load_identity(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_identity(path).peer == first.peer
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_identity(path)
    path.chmod(0o600)
    path.write_text("not hexadecimal")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        load_identity(path)


def test_one_daemon_per_folder(tmp_path: Path):
    assert running_daemon(tmp_path) is None
    home = DataDirectory(tmp_path)
    home.announce(api="http://x")
    with pytest.raises(LocalError, match="another daemon"):
        DataDirectory(tmp_path)
    facts = running_daemon(tmp_path)
    assert facts is not None
    assert facts["pid"] == os.getpid()
    home.close()
    assert running_daemon(tmp_path) is None
    again = DataDirectory(tmp_path)
    assert running_daemon(tmp_path) is None, "its next life has not announced anything yet"
    assert again.remembered()["api"] == "http://x"
    again.close()


def test_who_only_looks_keeps_no_daemon_from_its_folder(tmp_path: Path):
    """Check a probe just at a daemon's start: it must not be taken for a daemon."""
    DataDirectory(tmp_path).close()
    with subprocess.Popen([sys.executable, "-c", LOOKING, str(tmp_path)], stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None
        looking.stdout.readline()
        try:
            for _ in range(1500):
                DataDirectory(tmp_path).close()
        finally:
            looking.kill()


LOOKING = """
import sys
from pathlib import Path
from dilocox.transport.process.health import running_daemon
print(flush=True)
while True:
    running_daemon(Path(sys.argv[1]))
"""
CHILD = """
import threading
from dilocox.transport.process.parent_pipe import exit_with_parent
exit_with_parent()
print("up", flush=True)
threading.Event().wait()
"""
PARENT = """
import subprocess, sys, threading
from pathlib import Path
from dilocox.transport.process.parent_pipe import ParentPipe
pipe = ParentPipe(Path(sys.argv[1]))
arguments = [sys.executable, "-c", sys.argv[2]]
child = subprocess.Popen(arguments, env=pipe.environment(), stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
threading.Event().wait()
"""


def test_killing_the_parent_ends_the_child(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert helpers.gone(child)


def test_the_dht_process_has_no_torch_in_memory():
    script = "import sys, dilocox.transport.net.dht_child; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0


def put(
    number: int, *, key: str = "", signer: int | None = None, seconds: float = 300.0, subkey: bytes = dht_child.PLAIN
) -> dht_child.DHTRecord:
    """Return a record that a peer asks a node of the DHT to store."""
    signed = seal(helpers.identity(number if signer is None else signer), pb.KIND_PEER_RECORD, RUN_ID, pb.PeerRecord())
    at = dht_child.DHTID.generate(source=key or dht_child.key_of(RUN_ID, helpers.identity(number).peer)).to_bytes()
    value = dht_child.MSGPackSerializer.dumps(signed.envelope.SerializeToString())
    return dht_child.DHTRecord(at, subkey, value, dht_child.get_dht_time() + seconds)


def test_the_dht_keeps_a_record_under_its_own_key_and_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    keeper = dht_child.PeerRecordValidator(RUN_ID)
    assert keeper.validate(put(1))
    assert not keeper.validate(put(1, signer=2)), "under another's key"
    assert not keeper.validate(put(1, key="dilocox"))
    assert not keeper.validate(put(1, seconds=limits.DHT_RECORD_SECONDS + 60.0)), "expiry was the writer's choice"
    assert not keeper.validate(put(1, subkey=b"x"))
    assert not keeper.validate(dataclasses.replace(put(1), value=b"junk"))
    assert not dht_child.PeerRecordValidator(helpers.digest("another run")).validate(put(1))


def test_strangers_crowd_out_each_other_in_the_dht_and_no_member(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "DHT_STRANGERS", 3)
    keeper = dht_child.PeerRecordValidator(RUN_ID)
    keeper.known = frozenset(helpers.identity(number).peer for number in range(100, 110))
    assert [keeper.validate(put(number)) for number in range(5)] == [True, True, True, False, False]
    assert keeper.validate(put(0)), "who is here publishes again"
    assert all(keeper.validate(put(number)) for number in range(100, 110))
    now = dht_child.get_dht_time()
    monkeypatch.setattr(dht_child, "get_dht_time", lambda: now + 400)
    assert keeper.validate(put(4)), "the others have expired"


async def test_the_dht_process_ends_when_libp2p_dies_while_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check it: hivemind would wait for ever, and the daemon can restart the process only after its end."""

    async def killed_while_joining(p2p: Any, **_: object) -> None:
        dht_child.process_of(p2p).kill()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("dilocox.transport.net.dht_child.DHTNode.create", killed_while_joining)
    key = tmp_path / "libp2p.key"
    write_atomically(key, load_identity(tmp_path / "identity.key").libp2p_private_key(), mode=0o600)
    settings = {"run_id": "00" * 32, "identity": str(key), "listen": "/ip4/127.0.0.1/tcp/0", "bootstrap": [], "keeps": True}
    with pytest.raises(RuntimeError, match="libp2p's process ended"):
        async with asyncio.timeout(helpers.PATIENCE_SECONDS):
            await dht_child.run(settings, dht_child.PeerRecords)


async def test_a_dht_process_that_says_too_much_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\necho >> {tmp_path}/starts\nhead -c 20000000 /dev/zero\nsleep 3600\n")
    child.chmod(0o700)
    monkeypatch.setattr("dilocox.transport.net.dht.sys.executable", str(child))
    monkeypatch.setattr("dilocox.transport.net.dht.LONGEST_RESTART_SECONDS", 0.0)
    running = asyncio.create_task(Dht(DhtSettings(RUN_ID, helpers.identity(1), tmp_path, "/ip4/127.0.0.1/tcp/0", ())).run())
    await helpers.until(
        lambda: running.done() or ((tmp_path / "starts").exists() and len((tmp_path / "starts").read_text()) > 1)
    )
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def test_cutting_the_pipe_ends_the_child_and_late_children_too(tmp_path: Path):
    pipe = ParentPipe(tmp_path)
    environment = pipe.environment()
    child = subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    pipe.close()
    assert child.wait(timeout=600) == 0
    child.stdout.close()
    pipe.close()


def test_a_view_outlives_an_error_in_its_reader(tmp_path: Path):
    """Check a parser that raises: its traceback references the bytes, which must not become another error."""
    import numpy as np

    blobs = store(tmp_path, "a")
    digest = blobs.put([b"x" * 100])

    def parse(view: memoryview) -> None:
        array = np.frombuffer(view, dtype=np.uint8)
        raise RemoteError(pb.REASON_MALFORMED, f"{array.size} bytes of nonsense")

    with pytest.raises(RemoteError, match="100 bytes"):
        parse(blobs.view(digest))
    assert bytes(blobs.view(blobs.put([]))) == b""


def test_grpc_knows_every_option_that_we_set():
    """Check the options, because gRPC ignores an unknown one silently; then, for example, keepalive pings end idle
    connections."""
    found = importlib.util.find_spec("grpc._cython.cygrpc")
    assert found is not None
    library = Path(found.origin or "").read_bytes()
    names = re.findall(r'"(grpc\.[a-z0-9_.]+)"', Path(transport_rpc.__file__).read_text())
    assert len(names) > 8
    assert [name for name in names if name.encode() not in library] == []
