"""Invalid calls to every RPC of a coordinator and of a peer, over real connections: raw bytes, with valid and invalid
credentials.

The servers run in one process as in the product, except that statements have no rate limit, so that calls reach the
code behind it. No call may end the server, log a traceback, receive a status with "unexpected", or change the round.
The round contains only statements as signed, and a restart finds the same.
"""

import asyncio
import logging
import multiprocessing
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from google.protobuf.message import Message

from bench.mutation import Mutator
from bench.parsers import RUN, statements
from dilocox.coordinator.service import Contacts, CoordinatorService
from dilocox.node.attest.prover import AttestorService
from dilocox.node.attest.verify import appraise
from dilocox.node.hosts.cluster_link import proof
from dilocox.node.hosts.lead import BoxAdmission
from dilocox.protocol import limits
from dilocox.protocol.consensus.rules import JUDGES
from dilocox.protocol.crypto import sha256
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import open_envelope, seal
from dilocox.transport.limits import caller_auth as callers
from dilocox.transport.limits import head_gossip
from dilocox.transport.limits.caller_auth import CallerAuth, Credentials
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.net import tls
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.reachability import ReachService
from dilocox.transport.net.rpc import create_server
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.helpers import COORDINATOR, Table, digest, identity, serve_also
from tests.peers import meeting

__all__ = ["call_all", "merged"]

CHUNKS = 20
AT_ONCE = 8
"""Calls in flight: what one address may have at a peer."""
CALL_SECONDS = 30.0
MEMBER, STRANGER = identity(1), identity(50)
REFUSALS = frozenset(("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "NOT_FOUND"))
REFUSALS |= {"FAILED_PRECONDITION", "CANCELLED"}
SAID_BY_CLIENT = "Internal error from Core"
"""Error of the client's own gRPC, if the server answers before it received everything."""
BLOB = b"what a peer serves" * 1000


# The servers


class Errors(logging.Handler):
    """First lines of the log entries that the server should never have written."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.said[f"{record.name}: {record.getMessage().splitlines()[0]} {error!r}"[:200]] += 1


@dataclass
class Servers:
    """Coordinator in a round with a contribution from every cluster, and one of its peers."""

    service: CoordinatorService
    coordinator: pb.PeerRecord
    peer: pb.PeerRecord
    folder: Path
    head: bytes

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path) -> AsyncIterator["Servers"]:
        table, _ = statements()
        async with AsyncExitStack() as closing:
            (peer,) = await closing.enter_async_context(meeting(folder, RUN, table.commits))
            peer.store.put([BLOB])
            peer.lead.admit(BoxAdmission(RUN.run_id, identity(0).peer, SECRET, cuda=False, most=1))
            serve_also(peer.service, is_member=lambda name: name in peer.chain.head.cluster_by_peer)
            certificate = tls.load_or_create(folder)
            callers = CallerAuth(RUN.run_id, certificate.certificate_der)
            service = cls.coordinate(folder, table, Contacts(callers, PeerDirectory(None, COORDINATOR, RUN.run_id, 1)))
            server, port = await create_server("127.0.0.1:0", certificate)
            record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der, sequence=1)
            service.learn_own_record(seal(COORDINATOR, pb.KIND_PEER_RECORD, RUN.run_id, record))
            rpc.add_CoordinatorServicer_to_server(service, server)
            rpc.add_ReachServicer_to_server(ReachService(RUN.run_id, callers, HeadGossip()), server)
            rpc.add_AttestorServicer_to_server(AttestorService(), server)
            await server.start()
            closing.push_async_callback(server.stop, 0)
            running = [asyncio.create_task(work) for work in (service.driver.run(), service.run())]
            yield cls(service, record, peer.record, folder, service.chain.head.digest)
            assert not any(task.done() for task in running), "the coordinator ended"
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @staticmethod
    def coordinate(folder: Path, table: Table | None = None, contacts: Contacts | None = None) -> CoordinatorService:
        chain = ChainFile(folder / "chain.db", RUN)
        for commit in table.commits if table else ():
            chain.append(commit.envelope)
        service = CoordinatorService(COORDINATOR, chain, pb.Envelope(), appraise, contacts=contacts)
        service.resume()
        return service

    async def look(self) -> list[str]:
        """Return the faults found."""
        await self.service.driver.flush()
        state, found = self.service.state, []
        if state.head.digest != self.head:
            found.append("another round is open")
        gathered = state.gathered
        for slots in (gathered.claims, gathered.clusters, gathered.leaves, gathered.reports, gathered.contributions):
            for statement in [statement for slot in slots.values() for statement in slot]:
                if open_envelope(statement.envelope, RUN.run_id, JUDGES).peer not in (MEMBER.peer, STRANGER.peer):
                    found.append("a statement of somebody who said nothing")
        again = self.coordinate(self.folder)
        if again.state.gathered != gathered:
            found.append("a restart finds another round")
        again.chain.close()
        return found


async def _serve(folder: Path, pipe: Connection) -> None:
    limits.STATEMENTS_PER_SECOND = limits.STATEMENTS_BURST = 1 << 30
    errors, loop = Errors(), asyncio.get_running_loop()
    logging.getLogger().addHandler(errors)
    logging.getLogger().setLevel(logging.ERROR)
    async with Servers.open(folder) as servers:
        pipe.send([record.SerializeToString() for record in (servers.coordinator, servers.peer)])
        while await loop.run_in_executor(None, pipe.recv):
            found = Counter({f"the round: {what}": 1 for what in await servers.look()}) + errors.said
            errors.said.clear()
            pipe.send((dict(found), psutil.Process().memory_info().rss))


def serve(folder: Path, pipe: Connection) -> None:
    """Answer every question about the server until a false one, in a child process."""
    asyncio.run(_serve(folder, pipe))


# The calls


@dataclass(frozen=True)
class Method:
    path: str
    corpus: tuple[bytes, ...]
    message: type[Message]
    weight: int = 1
    at_peer: bool = False
    inside: Callable[[Mutator, bytes], bytes] = lambda mutator, raw: raw
    """Spoils what is signed inside, and signs it again."""
    parts: bool = False
    """True: it takes a stream."""
    reads: int = 0
    """Messages read from the response stream before the call is cancelled."""

    @property
    def name(self) -> str:
        return self.path.removeprefix("/dilocox.v1.")


def methods() -> list[Method]:
    _, said = statements()
    bodies = {one.kind: type(one.body) for one in said}
    mine = {one.kind: seal(MEMBER, one.kind, RUN.run_id, one.envelope.body).envelope for one in said}
    record, beat = mine[pb.KIND_PEER_RECORD], mine[pb.KIND_HEARTBEAT]

    def signed(mutator: Mutator, envelope: pb.Envelope) -> pb.Envelope:
        kind = envelope.kind if envelope.kind in bodies else pb.KIND_CLAIM
        body = mutator.spoil(envelope.body, [envelope.body], bodies[kind])
        return seal(mutator.random.choice((MEMBER, STRANGER)), kind, RUN.run_id, body).envelope

    def within(kind: type[Any], name: str) -> Callable[[Mutator, bytes], bytes]:
        def spoil(mutator: Mutator, raw: bytes) -> bytes:
            message = kind.FromString(raw)
            getattr(message, name).CopyFrom(signed(mutator, getattr(message, name)))
            return bytes(message.SerializeToString())

        return spoil

    content = digest_of_blob()
    watch = services.WatchRequest(from_round=1, hello=beat)
    index = services.BlobIndex(size=len(BLOB), chunk_hashes=[sha256(BLOB)])
    push = services.PushRequest(index=services.PushIndex(digest=content, index=index))
    coordinator, peer, lead = "/dilocox.v1.Coordinator/", "/dilocox.v1.Peer/", "/dilocox.v1.Lead/"
    return [
        Method(coordinator + "GetRun", (b"",), services.GetRunRequest),
        Method(coordinator + "GetPresence", (b"",), services.GetPresenceRequest),
        Method(coordinator + "GetChallenge", _raw(services.ChallengeRequest(peer=MEMBER.peer)), services.ChallengeRequest),
        Method(
            coordinator + "Watch", _raw(watch), services.WatchRequest, 2, inside=within(services.WatchRequest, "hello"), reads=1
        ),
        Method(
            coordinator + "Submit",
            _raw(*mine.values()),
            pb.Envelope,
            8,
            inside=lambda mutator, raw: signed(mutator, pb.Envelope.FromString(raw)).SerializeToString(),
        ),
        Method("/dilocox.v1.Attestor/Attest", _raw(services.Challenge(nonce=digest(1))), services.Challenge),
        Method(
            "/dilocox.v1.Reach/DialBack",
            _raw(services.DialBackRequest(record=record)),
            services.DialBackRequest,
            inside=within(services.DialBackRequest, "record"),
        ),
        Method(peer + "Fetch", _raw(services.FetchRequest(digest=content)), services.FetchRequest, 2, True, reads=3),
        Method(peer + "GetCommit", _raw(services.CommitRequest(round=1)), services.CommitRequest, 1, True),
        Method(peer + "GetShare", _raw(services.ShareRequest(blob=content)), services.ShareRequest, 1, True),
        Method(peer + "Push", _raw(push, services.PushRequest(data=BLOB)), services.PushRequest, 2, True, parts=True),
        Method(lead + "Follow", _raw(*said_by_a_box()), boxes.BoxEvent, 2, True, parts=True, reads=2),
        Method(lead + "Meet", _raw(boxes.Bytes(data=BLOB)), boxes.Bytes, 1, True, parts=True, reads=1),
    ]


SECRET = bytes(32)


def said_by_a_box() -> list[boxes.BoxEvent]:
    shown = proof(SECRET, RUN.run_id, identity(0).peer, MEMBER.peer)
    return [
        boxes.BoxEvent(hello=boxes.BoxHello(proof=shown, devices=2)),
        boxes.BoxEvent(said=boxes.WorkerSaid(generation=1, rank=1, event=worker.WorkerEvent(hello=worker.Hello(rank=1)))),
        boxes.BoxEvent(ended=1),
        boxes.BoxEvent(answer=boxes.BoxAnswer(ask=1, reason=pb.REASON_UNAVAILABLE, stage=1)),
    ]


def _raw(*messages: Message) -> tuple[bytes, ...]:
    return tuple(message.SerializeToString() for message in messages)


def digest_of_blob() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return BlobStore(Path(folder)).put([BLOB])


@dataclass
class Tally:
    """Results of a chunk of calls."""

    codes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Status codes by method."""
    findings: dict[str, list[int]] = field(default_factory=dict)
    """Findings by kind: the number of the first call, and the count."""

    def found(self, what: str, number: int, count: int = 1) -> None:
        self.findings.setdefault(what, [number, 0])[1] += count


class Client:
    """Calls by number: the same for a seed."""

    def __init__(self, seed: int, coordinator: pb.PeerRecord, peer: pb.PeerRecord) -> None:
        self._seed, self._methods = seed, methods()
        self._weights = [method.weight for method in self._methods]
        self._channels = {at_peer: self._channel(record) for at_peer, record in ((False, coordinator), (True, peer))}
        self._credentials = {
            at_peer: [Credentials(one, RUN.run_id, record.certificate).metadata[0][1] for one in (MEMBER, STRANGER)]
            for at_peer, record in ((False, coordinator), (True, peer))
        }

    @staticmethod
    def _channel(record: pb.PeerRecord) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(tls.pem_of(record.certificate))
        return grpc.aio.secure_channel(record.address, credentials, [("grpc.ssl_target_name_override", tls.SERVER_NAME)])

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _metadata(self, mutator: Mutator, at_peer: bool) -> list[tuple[str, bytes]]:
        random, found = mutator.random, []
        credential = random.choice(self._credentials[at_peer])
        if random.random() < 0.8:
            spoilt = mutator.spoil(credential, self._credentials[at_peer], pb.Envelope)
            found.append((callers.HEADER, credential if random.random() < 0.8 else spoilt[:4000]))
        if random.random() < 0.3:
            tip = services.Tip(round=3, head=digest(3)).SerializeToString()
            found.append((head_gossip.HEADER, mutator.spoil(tip, [tip], services.Tip)[:2000]))
        return found

    async def call(self, number: int, tally: Tally) -> None:
        mutator = Mutator(self._seed << 64 | number)
        method = mutator.random.choices(self._methods, self._weights)[0]
        raws = [
            raw if mutator.random.random() < 0.2 else self._spoilt(mutator, method, raw)
            for raw in self._chosen(mutator, method)
        ]
        code, detail = await self._send(method, raws, self._metadata(mutator, method.at_peer))
        tally.codes[method.name][code] += 1
        if code != "OK" and code not in REFUSALS:
            tally.found(f"{method.name}: {code}: {detail[:80]}", number)

    def _chosen(self, mutator: Mutator, method: Method) -> list[bytes]:
        return list(method.corpus) if method.parts else [mutator.random.choice(method.corpus)]

    def _spoilt(self, mutator: Mutator, method: Method, raw: bytes) -> bytes:
        if mutator.random.random() < 0.6:
            raw = method.inside(mutator, raw)
        return raw if mutator.random.random() < 0.5 else mutator.spoil(raw, method.corpus, method.message)

    async def _send(self, method: Method, raws: list[bytes], metadata: list[tuple[str, bytes]]) -> tuple[str, str]:
        channel: Any = self._channels[method.at_peer]  # as generated stubs use it, but for bytes
        try:
            if method.parts and method.reads:
                answers = channel.stream_stream(method.path)(iter(raws), metadata=metadata, timeout=CALL_SECONDS)
                for _ in range(method.reads):
                    if await answers.read() is grpc.aio.EOF:
                        break
                answers.cancel()
            elif method.parts:
                await channel.stream_unary(method.path)(iter(raws), metadata=metadata, timeout=CALL_SECONDS)
            elif method.reads:
                stream = channel.unary_stream(method.path)(raws[0], metadata=metadata, timeout=CALL_SECONDS)
                for _ in range(method.reads):
                    if await stream.read() is grpc.aio.EOF:
                        break
                stream.cancel()
            else:
                await channel.unary_unary(method.path)(raws[0], metadata=metadata, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            ours = error.code() is grpc.StatusCode.INTERNAL and error.details() == SAID_BY_CLIENT
            return "CANCELLED" if ours else error.code().name, error.details() or ""
        return "OK", ""

    async def chunk(self, first: int, count: int) -> Tally:
        tally, numbers = Tally(), iter(range(first, first + count))

        async def some() -> None:
            for number in numbers:
                await self.call(number, tally)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        return tally


@asynccontextmanager
async def running(seed: int) -> AsyncIterator[tuple[Client, Callable[[], tuple[dict[str, int], int]]]]:
    """Yield a client, and a function that returns the server's faults since its last call, and its resident bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(Path(folder), theirs), daemon=True)
        process.start()
        theirs.close()

        def ask() -> tuple[dict[str, int], int]:
            try:
                ours.send(True)
                answer: tuple[dict[str, int], int] = ours.recv()
                return answer
            except (EOFError, OSError):
                process.join()
                return {f"the server ended with {process.exitcode}": 1}, 0

        client = Client(seed, *(pb.PeerRecord.FromString(raw) for raw in ours.recv()))
        try:
            yield client, ask
        finally:
            await client.close()
            process.kill()
            process.join()


async def call_all(
    calls: int, seed: int, done: Mapping[str, dict[str, Any]], keep: Callable[[str, dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Make the calls that are not `done`; return a line for each method."""
    size = max(1, calls // CHUNKS)
    places = {f"{number * size}+{size}": number * size for number in range(CHUNKS)}
    missing = [place for place in places if place not in done or done[place]["findings"]]
    if missing:
        async with running(seed) as (client, ask):
            for place in missing:
                started = time.perf_counter()
                tally = await client.chunk(places[place], size)
                wrong, resident = await asyncio.to_thread(ask)
                for what, count in wrong.items():
                    tally.found(what, places[place], count)
                for what, (number, count) in tally.findings.items():
                    print(f"call {number}: {count} × {what}", flush=True)
                codes = {name: dict(found) for name, found in tally.codes.items()}
                seconds = time.perf_counter() - started
                keep(place, {"codes": codes, "findings": tally.findings, "seconds": seconds, "resident": resident})
    return list(lines([done[place] for place in places]))


def merged(outcomes: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the findings of several chunks, each with the number of its first input."""
    found: dict[str, list[int]] = {}
    for outcome in outcomes:
        for what, (first, count) in outcome["findings"].items():
            found.setdefault(what, [first, 0])[1] += count
    return found


def lines(chunks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a line per method; the last line has all that belongs to no method, such as the server's memory."""
    seconds, inputs = sum(chunk["seconds"] for chunk in chunks), 0
    findings = {f"call {number}: {what}": count for what, (number, count) in merged(chunks).items()}
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for chunk in chunks:
        for name, codes in chunk["codes"].items():
            totals[name] += Counter(codes)
    inputs = sum(sum(codes.values()) for codes in totals.values())
    for name, codes in sorted(totals.items()):
        own = {what: count for what, count in findings.items() if f": {name}: " in what}
        share = seconds * sum(codes.values()) / inputs
        line = {"target": name, "inputs": sum(codes.values()), "accepted": codes["OK"], "seconds": share, "growth": 0}
        yield {**line, "findings": own, "codes": dict(codes)}
        findings = {what: count for what, count in findings.items() if what not in own}
    resident = [chunk["resident"] for chunk in chunks if chunk["resident"]]
    growth = resident[-1] - resident[0] if resident else 0
    yield {"target": "the servers", "inputs": 0, "accepted": 0, "seconds": 0.0, "growth": growth, "findings": findings}
