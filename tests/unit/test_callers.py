"""Tests of callers' identities, and of limits that separate unknown peers from all others."""

import asyncio
import os
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from dilocox.node.exchange.downloader import Downloader
from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import seal
from dilocox.transport.limits import caller_auth
from dilocox.transport.limits.caller_auth import HEADER, CallerAuth
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Limit
from dilocox.transport.net import blob_server
from dilocox.transport.net import rpc as transport
from dilocox.transport.net.rpc import ChannelPool, fetch_blob
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import digest, identity, serve_also, until
from tests.unit.test_transport import RUN_ID, Served, serving

MEMBER, MALLORY = identity(1), identity(2)
PATIENCE_SECONDS = 60.0
FRAMES = [os.urandom(1 << 20)] * 24
"""More than a connection takes in before its reader reads: then the server waits for it."""


class Call:
    """A call's context, as a service sees it."""

    def __init__(self, metadata: tuple[tuple[str, bytes], ...] = (), address: str = "ipv4:192.0.2.1:4711") -> None:
        self.metadata, self._address = metadata, address

    def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self.metadata

    def peer(self) -> str:
        return self._address


def credential(run_id: bytes = RUN_ID, certificate: bytes = b"theirs") -> bytes:
    ((_, raw),) = caller_auth.Credentials(MEMBER, run_id, certificate).metadata
    return raw


def test_a_credential_names_its_signer_and_is_good_for_one_server_and_one_run():
    server = CallerAuth(RUN_ID, b"theirs")
    for _ in range(2):
        assert server.peer(Call(((HEADER, credential()),))) == MEMBER.peer  # type: ignore[arg-type]
    assert server.peer(Call()) == ""  # type: ignore[arg-type]
    raw = credential()
    beat = seal(MEMBER, pb.KIND_HEARTBEAT, RUN_ID, pb.Heartbeat(sequence=1)).envelope.SerializeToString()
    for spoiled in (credential(certificate=b"another"), credential(digest("another run")), raw[:-1] + b"x", b"junk", beat):
        with pytest.raises(RemoteError):
            server.peer(Call(((HEADER, spoiled),)))  # type: ignore[arg-type]


def test_credentials_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CREDENTIALS", 3)
    server = CallerAuth(RUN_ID, b"theirs")
    calls = [Call(caller_auth.Credentials(identity(number), RUN_ID, b"theirs").metadata) for number in range(10)]
    for number, call in enumerate(calls):
        assert server.peer(call) == identity(number).peer  # type: ignore[arg-type]
    remembered = [server.remembered(call) for call in calls]  # type: ignore[arg-type]
    assert remembered == [""] * 7 + [identity(number).peer for number in (7, 8, 9)]


def test_credentials_of_unknown_peers_push_out_no_known_peer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CREDENTIALS", 3)
    known = identity(0).peer
    server = CallerAuth(RUN_ID, b"theirs", lambda peer: peer == known)
    calls = [Call(caller_auth.Credentials(identity(number), RUN_ID, b"theirs").metadata) for number in range(10)]
    for call in calls:
        server.peer(call)  # type: ignore[arg-type]
    assert server.remembered(calls[0]) == known  # type: ignore[arg-type]


async def idle(channel, blob: bytes) -> grpc.aio.UnaryStreamCall[Any, Any]:
    """Open a stream that requests a blob and reads only its first message."""
    stream = rpc.PeerStub(channel).Fetch(services.FetchRequest(digest=blob))
    await anext(aiter(stream))
    return stream


@pytest.mark.parametrize("who", [None, MALLORY], ids=["without a name", "with a name"])
async def test_idle_streams_of_strangers_stop_no_member(who, tmp_path: Path):
    """Reproduce a fault: sixteen of them occupied every slot of a node, for ever."""
    source = BlobStore(tmp_path / "source")
    blob = source.put(FRAMES)
    served = serving(tmp_path / "peer", source)
    serve_also(served.service, is_member=lambda peer: peer == MEMBER.peer)
    async with AsyncExitStack() as closing, served as record, asyncio.timeout(PATIENCE_SECONDS):
        strangers = [ChannelPool(who, RUN_ID) for _ in range(48)]
        member = ChannelPool(MEMBER, RUN_ID)
        for pool in (*strangers, member):
            closing.push_async_callback(pool.close)
        started = [asyncio.create_task(idle(pool.channel(record), blob)) for pool in strangers]
        while sum(task.done() and not task.exception() for task in started) < limits.STREAMS_PER_ADDRESS:
            await asyncio.sleep(0.01)
        await fetch_blob(member.channel(record), BlobStore(tmp_path / "target"), blob)
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


async def test_idle_streams_of_a_member_stop_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blob_server, "GRACE_SECONDS", PATIENCE_SECONDS)
    source = BlobStore(tmp_path / "source")
    blob = source.put(FRAMES)
    served = serving(tmp_path / "peer", source)
    serve_also(served.service, is_member=lambda peer: True)
    async with AsyncExitStack() as closing, served as record, asyncio.timeout(PATIENCE_SECONDS):
        greedy, member = ChannelPool(MALLORY, RUN_ID), ChannelPool(MEMBER, RUN_ID)
        for pool in (greedy, member):
            closing.push_async_callback(pool.close)
        held = [await idle(greedy.channel(record), blob) for _ in range(limits.STREAMS_PER_MEMBER)]
        one_more = asyncio.create_task(idle(greedy.channel(record), blob))
        await fetch_blob(member.channel(record), BlobStore(tmp_path / "target"), blob)
        assert not one_more.done()
        held.pop().cancel()
        held.append(await one_more)
        for stream in held:
            stream.cancel()


async def test_who_has_earned_more_goes_first_and_newcomers_hold_few_streams():
    turns, entered = blob_server.StreamQuota(each=4, total=6), list[str]()

    async def take(caller: str, earned: float) -> None:
        async with turns.turn(caller, earned):
            entered.append(caller)
            await asyncio.Event().wait()

    names = [f"new-{number}" for number in range(8)]
    tasks = [asyncio.create_task(take(name, 1 / 16)) for name in names for _ in range(2)]
    await until(lambda: len(entered) == 6)
    assert entered == names[:6], "each of them has one stream, not four"
    assert turns.here["new-0"] == 2, "and the other waits"
    tasks += [asyncio.create_task(take("established", 1.0)) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:8]:  # four streams end
        task.cancel()
    await until(lambda: len(entered) == 10)
    assert entered[6:] == ["established"] * 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not turns.here


async def test_who_waits_is_bounded_by_caller_and_in_all_and_not_for_ever(monkeypatch: pytest.MonkeyPatch):
    turns = blob_server.StreamQuota(each=2, total=3, waiting=2)
    async with AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(turns.turn("a"))
        waiting = [asyncio.create_task(held.enter_async_context(turns.turn("a"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RemoteError):  # one address has its two, and two that wait
            await held.enter_async_context(turns.turn("a"))
        await held.enter_async_context(turns.turn("b"))
        with pytest.raises(RemoteError):  # five in all
            await held.enter_async_context(turns.turn("c"))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        monkeypatch.setattr(blob_server, "WAIT_SECONDS", 0.01)
        with pytest.raises(RemoteError, match=r"^rate: "):
            await held.enter_async_context(turns.turn("c"))
    async with turns.turn("c"):
        pass
    assert not turns.here
    assert not turns.own


async def test_a_stranger_past_its_share_and_a_spoiled_credential_are_refused_in_a_word(tmp_path: Path):
    source = BlobStore(tmp_path / "source")
    blob = source.put(FRAMES)
    async with AsyncExitStack() as closing, serving(tmp_path / "peer", source) as record, asyncio.timeout(PATIENCE_SECONDS):
        pool = ChannelPool()
        closing.push_async_callback(pool.close)
        most = 2 * limits.STREAMS_PER_ADDRESS
        started = [asyncio.create_task(idle(pool.channel(record), blob)) for _ in range(most + 1)]
        done, _ = await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
        refused = [task for task in done if task.exception()]
        assert "resource_exhausted" in str(refused[0].exception()).lower()
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
        for junk in (b"junk", b"x" * 4000, credential()):
            stream = rpc.PeerStub(pool.channel(record)).Fetch(services.FetchRequest(digest=blob), metadata=((HEADER, junk),))
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await anext(aiter(stream))
            assert lost.value.code() is grpc.StatusCode.UNAUTHENTICATED


class Counting(blob_server.PeerService):
    """Service that counts its calls in progress."""

    going = 0

    async def Fetch(self, request, context) -> None:  # type: ignore[override]  # it writes
        self.going += 1
        try:
            await super().Fetch(request, context)
        finally:
            self.going -= 1


async def test_who_takes_a_blob_too_slowly_loses_the_stream_and_the_server_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blob_server, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "TRANSFER_BYTES_PER_SECOND", 1 << 30)
    source = BlobStore(tmp_path / "source")
    blob = source.put(FRAMES)
    served = serving(tmp_path / "peer", source)
    served.service = counting = Counting(source, served.service.callers)
    async with AsyncExitStack() as closing, served as record, asyncio.timeout(PATIENCE_SECONDS):
        pool = ChannelPool()
        closing.push_async_callback(pool.close)
        streams = [await idle(pool.channel(record), blob) for _ in range(limits.STREAMS_PER_ADDRESS + 1)]
        while counting.going:
            await asyncio.sleep(0.01)
        for stream in streams:
            stream.cancel()


class Trickle(rpc.PeerServicer):
    """Service that sends one byte at a time, well within every pause that a fetcher allows."""

    def __init__(self, source: BlobStore) -> None:
        self._source = source
        self.cancelled = asyncio.Event()

    async def Fetch(self, request, context):
        size, hashes = self._source.size(request.digest), self._source.index(request.digest)
        yield services.FetchReply(index=services.BlobIndex(size=size, chunk_hashes=hashes))
        try:
            for byte in bytes(self._source.view(request.digest)):
                yield services.FetchReply(data=bytes([byte]))
                await asyncio.sleep(0.05)
        finally:
            self.cancelled.set()


async def test_a_trickle_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reproduce a fault: one byte in five seconds outlived its round and occupied one of the fetcher's slots."""
    monkeypatch.setattr(transport, "STALL_SECONDS", 1.0)
    source = BlobStore(tmp_path / "source")
    blob = source.put([os.urandom(10_000)])
    async with Served(tmp_path / "peer", Trickle(source)) as record, asyncio.timeout(PATIENCE_SECONDS):  # type: ignore[abstract]
        pool = ChannelPool()
        with pytest.raises(RemoteError, match=r"^unavailable: .*stopped"):
            await fetch_blob(pool.channel(record), BlobStore(tmp_path / "target"), blob)
        await pool.close()


class Halting(rpc.PeerServicer):
    """Service that sends the first chunk, and never answers a request for the rest."""

    def __init__(self, source: BlobStore) -> None:
        self._source = source

    async def Fetch(self, request, context):
        if request.first_chunk:
            await asyncio.Event().wait()
        size, hashes = self._source.size(request.digest), self._source.index(request.digest)
        yield services.FetchReply(index=services.BlobIndex(size=size, chunk_hashes=hashes))
        yield services.FetchReply(data=bytes(self._source.view(request.digest)[: limits.CHUNK_BYTES]))


async def test_who_never_answers_a_resumed_fetch_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 1.0)
    source, target = BlobStore(tmp_path / "source"), BlobStore(tmp_path / "target")
    blob = source.put([os.urandom(limits.CHUNK_BYTES + 1)])
    async with Served(tmp_path / "peer", Halting(source)) as record, asyncio.timeout(PATIENCE_SECONDS):  # type: ignore[abstract]
        pool = ChannelPool()
        for _ in range(2):  # the second one resumes
            with pytest.raises(RemoteError, match=r"^unavailable: .*stopped"):
                await fetch_blob(pool.channel(record), target, blob)
        await pool.close()


async def test_a_thread_that_writes_is_outlived_however_often_its_waiter_is_cancelled():
    """Reproduce a fault: the second cancel left the thread alone with the file, which a new download wrote too."""
    going, done = threading.Event(), threading.Event()

    def write() -> None:
        going.wait(PATIENCE_SECONDS)
        done.set()

    task = asyncio.create_task(transport.in_thread(write))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0.01)
    alone = task.done()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alone
    assert done.is_set()


class At:
    """Directory that returns one address for every peer."""

    def __init__(self, record: pb.PeerRecord) -> None:
        self._record = record

    async def look_up(self, peer: str) -> None:
        pass

    async def find(self, peer: str) -> pb.PeerRecord:
        return self._record


async def test_a_download_ends_when_nobody_wants_it_any_more_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilocox.node.exchange.downloader.LINGER_SECONDS", 0.0)
    source = BlobStore(tmp_path / "source")
    blob = source.put([os.urandom(10_000)])
    trickle = Trickle(source)  # type: ignore[abstract]
    async with Served(tmp_path / "peer", trickle) as record, asyncio.timeout(PATIENCE_SECONDS):
        pool = ChannelPool()
        target = BlobStore(tmp_path / "target")
        downloader = Downloader(identity(9).peer, target, At(record), pool)
        first, second = (asyncio.create_task(downloader.fetch(blob, [MEMBER.peer])) for _ in range(2))
        while not downloader.statistics().wanted:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not trickle.cancelled.is_set()
        second.cancel()
        await trickle.cancelled.wait()
        while downloader.statistics().wanted:
            await asyncio.sleep(0.01)
        async with serving(tmp_path / "whole", source) as whole:  # and can be had again
            downloader = Downloader(identity(9).peer, target, At(whole), pool)
            await downloader.fetch(blob, [MEMBER.peer])
        assert target.verify(blob)
        await pool.close()


async def test_fetch_blob_larger_than_announced_is_rejected_before_its_bytes(tmp_path: Path):
    source, target = BlobStore(tmp_path / "source"), BlobStore(tmp_path / "target")
    blob = source.put([os.urandom(1001)])
    async with serving(tmp_path / "peer", source) as record:
        pool = ChannelPool()
        downloader = Downloader(identity(9).peer, target, At(record), pool)
        with pytest.raises(RemoteError) as rejected:
            await downloader.fetch(blob, [MEMBER.peer], max_size=1000)
        assert rejected.value.reason == pb.REASON_OVERSIZE
        assert downloader.statistics().bytes_received == 0
        assert blob not in target
        await downloader.fetch(blob, [MEMBER.peer], max_size=1001)
        assert blob in target
        await pool.close()


async def test_an_upload_that_is_cancelled_uses_up_nothing():
    limit = Limit(Rates(usual_bytes_per_second=1000.0))
    await limit.spend(1)
    waiting = [asyncio.create_task(limit.spend(1_000_000)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await limit.spend(1)


async def test_what_is_not_public_is_served_to_who_may_read(tmp_path: Path):
    source = BlobStore(tmp_path / "source")
    blob = source.put(FRAMES)
    served = serving(tmp_path / "peer", source)
    serve_also(served.service, may_read=lambda peer: peer == MEMBER.peer)
    async with AsyncExitStack() as closing, served as record, asyncio.timeout(PATIENCE_SECONDS):
        pools = [ChannelPool(MEMBER, RUN_ID), ChannelPool(MALLORY, RUN_ID), ChannelPool()]
        for pool in pools:
            closing.push_async_callback(pool.close)
        await fetch_blob(pools[0].channel(record), BlobStore(tmp_path / "target"), blob)
        for pool in pools[1:]:
            with pytest.raises(RemoteError, match="permission_denied"):
                await fetch_blob(pool.channel(record), BlobStore(tmp_path / "other"), blob)
        serve_also(served.service, is_member=lambda peer: peer == MALLORY.peer)
        await fetch_blob(pools[1].channel(record), BlobStore(tmp_path / "other"), blob)
