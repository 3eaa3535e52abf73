"""Follower host: runs its part of a cluster's workers, and fetches, verifies and serves its own stages."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.context.run_context import RunContext
from dilocox.node.exchange.coordinator_client import Backoff
from dilocox.node.hosts.host_stream import ALIVE_SECONDS, Silence, pump
from dilocox.node.hosts.lead_connection import LeadConnection
from dilocox.node.member.driver import MemberPort
from dilocox.node.state.retention import BlobRetention, blobs_of
from dilocox.node.workers.pool import Launch, WorkerPool
from dilocox.node.workers.progress import ClusterProgress
from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.member.member_io import Asked, Verdict
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope
from dilocox.transport.process.disk_pressure import probe

__all__ = ["Follower"]

log = logging.getLogger(__name__)

CHAIN_SECONDS = 30.0
"""Time within which a commit of the lead host's chain arrives here."""
TICKS_SECONDS = 1.0
NEVER = 1 << 32
"""Above every generation."""


class Follower:
    """Follower that obeys its lead host while the connection lasts; without it, it waits."""

    def __init__(
        self,
        context: RunContext,
        member: MemberPort,
        line: LeadConnection,
        pool: WorkerPool,
        own: OwnHost,
        keeping: BlobRetention,
        crew: ClusterProgress,
        interface: str,
    ) -> None:
        """Follow a lead host. `member`: receives the claims that it requests. `interface`: network interface of the
        workers' tensors."""
        self._manifest, self._me, self._chain = context.manifest, context.me, context.chain
        self._store, self._tasks, self._member = context.store, context.tasks, member
        self._line, self._pool, self._own, self._keeping = line, pool, own, keeping
        self._crew, self._interface = crew, interface
        self.progress = crew.progress
        self._outgoing: asyncio.Queue[boxes.BoxEvent] = asyncio.Queue()
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._starting: dict[int, tuple[worker.Start, list[worker.Apply]]] = {}
        """Complete starts, by request."""
        self._taken: dict[int, worker.Apply] = {}
        """Complete commits, by round."""
        self._running: asyncio.Task[None] | None = None
        """Our part of a generation."""
        self._ended = 0
        """The last generation that the lead ended, perhaps before we came to start it."""
        self._ticks = 0
        """Processor time of our workers."""
        self._grew = asyncio.Event()

    # As a participant sees its workers

    def chain_grew(self) -> None:
        self._grew.set()

    async def stop(self) -> None:
        await self._pool.stop()

    # The line to the lead

    async def run(self) -> None:
        """Follow the lead, again and again, until cancelled."""
        backoff, said = Backoff(), ""
        while True:
            why, status = "it does not answer", self._away
            try:
                await self._follow(await self._line.stub(), backoff)
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name.lower()
                if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
                    status = self._refused
            except RemoteError as error:
                why = error.detail
            told = status(why)
            self._member.show(told)
            if why != said:
                log.warning("%s", told.why)
                said = why
            await backoff.wait()

    def _away(self, why: str) -> Status:
        return Status("forming", f"the lead host {short(self._line.lead)} is away: {why}")

    def _refused(self, why: str) -> Status:
        return Status("refused", f"the lead host {short(self._line.lead)} refuses this host: {why}")

    async def _follow(self, stub: Any, backoff: Backoff) -> None:
        """Follow until the stream breaks, or the lead host is silent: then stop its worker group here."""
        self._outgoing, self._ended = asyncio.Queue(), 0
        self._send(hello=self._line.hello)
        silence = Silence()
        call = stub.Follow(self._events())

        async def obey() -> None:
            async for command in call:
                silence.heard()
                backoff.reset()
                self._obey(stub, command)

        work = [asyncio.create_task(each) for each in (obey(), silence.lasts(), self._beat(), self._count())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            ending = [*work, *self._asks.values()]
            for each in ending:
                each.cancel()
            call.cancel()
            await self._end()
            await asyncio.gather(*ending, return_exceptions=True)  # what is asked next time has the same numbers

    async def _events(self) -> AsyncIterator[boxes.BoxEvent]:
        while True:
            yield await self._outgoing.get()

    def _send(self, **event: Any) -> None:
        self._outgoing.put_nowait(boxes.BoxEvent(**event))

    async def _beat(self) -> None:
        """Waits for no thread: those may all be hashing."""
        while True:
            self._send(alive=boxes.BoxAlive(ticks=self._ticks, serves=self._own.serves_its_own()))
            await asyncio.sleep(ALIVE_SECONDS)

    async def _count(self) -> None:
        while True:
            self._ticks = await asyncio.to_thread(self._pool.processor_ticks)
            await asyncio.sleep(TICKS_SECONDS)

    def _obey(self, stub: Any, command: boxes.BoxCommand) -> None:
        match command.WhichOneof("command"):
            case "launch":
                self._running = self._tasks.start(self._run(stub, command.launch, self._running), "this host's workers")
            case "worker":
                self._pool.command(command.worker)
                if command.worker.HasField("stop"):
                    self._tasks.start(self._pool.stop(), "stop workers")
            case "end":
                self._ended = command.end
                self._pool.end_generation()
            case "ask":
                self._asks[command.ask.number] = self._tasks.start(self._answer(command.ask), "answer the lead host")
            case "drop":
                if (asked := self._asks.get(command.drop)) is not None:
                    asked.cancel()
            case "consent":
                self._member.feed(Asked(command.consent))
            case "begin":
                start, replays = self._starting[command.begin]
                self._pool.command(worker.WorkerCommand(start=start))
                for apply in replays:
                    self._pool.command(worker.WorkerCommand(apply=apply))
                self._starting = {}
            case "apply":
                self._pool.command(worker.WorkerCommand(apply=self._taken.pop(command.apply)))
            case "ready":
                self._tasks.start(self._ready(command.ready), "store a state")
            case "step":
                self._crew.step(command.step)
                self._member.show(None)

    # Generations

    async def _run(self, stub: Any, launch: boxes.LaunchBox, before: asyncio.Task[None] | None) -> None:
        """Our part of one, when nothing is left of the one before."""
        if before is not None:
            self._pool.end_generation()
            await asyncio.wait({before})
        self._own.host(launch.stages)
        self._starting, self._taken = {}, {}
        self._member.show(Status("starting", "starting the stage workers"))
        meeting = await asyncio.start_server(partial(self._meet, stub), "127.0.0.1", 0)
        port = meeting.sockets[0].getsockname()[1]
        try:
            if launch.generation > self._ended:
                forwarding = asyncio.create_task(self._forward(launch))
                try:
                    await self._pool.run_generation(
                        Launch(
                            launch.ranks,
                            launch.workers,
                            launch.copies,
                            launch.microbatches,
                            launch.recompute,
                            port,
                            interface=self._interface,
                        )
                    )
                finally:
                    await forwarding
        finally:
            meeting.close()
            self._send(ended=launch.generation)
        if launch.generation > self._ended:  # no command stopped them
            await asyncio.to_thread(probe, self._store.folder)  # a full disk is not the workers' fault

    async def _end(self) -> None:
        """Nothing is left of our part."""
        self._ended = NEVER
        self._pool.end_generation()
        if self._running is not None:
            await asyncio.wait({self._running})

    async def _meet(self, stub: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker's connection to the first worker's store, through our authenticated stream to its daemon."""

        async def parts() -> AsyncIterator[boxes.Bytes]:
            while data := await reader.read(limits.FRAME_BYTES):
                yield boxes.Bytes(data=data)

        try:
            await pump(stub.Meet(parts()), writer)
        except (grpc.aio.AioRpcError, ConnectionError) as error:
            log.debug("the connection of a worker to the first one ended: %s", error)

    async def _forward(self, launch: boxes.LaunchBox) -> None:
        """Forward the workers' messages. Before they write, delete what only an earlier process could need."""
        hellos: list[tuple[int, worker.Hello]] = []
        while (item := await self._pool.events.get()) is not None:
            rank, event = item
            if event.HasField("hello"):
                hellos.append((rank, await self._own.sound(event.hello)))
                if len(hellos) == len(launch.ranks):
                    await self._keeping.begin([hello for _, hello in hellos])
                    for number, hello in hellos:
                        self._pass_on(launch, number, worker.WorkerEvent(hello=hello))
                continue
            if event.HasField("boundary"):
                event = worker.WorkerEvent(boundary=await self._own.with_roots(event.boundary))
                self._keeping.boundary(event.boundary.round, blobs_of(event.boundary.payloads), event.boundary.complete)
                if event.boundary.HasField("marks"):
                    self._keeping.marks(event.boundary.round, event.boundary.marks)
            self._pass_on(launch, rank, event)

    def _pass_on(self, launch: boxes.LaunchBox, rank: int, event: worker.WorkerEvent) -> None:
        self._send(said=boxes.WorkerSaid(generation=launch.generation, rank=rank, event=event))

    async def _ready(self, ready: boxes.ClusterReady) -> None:
        """Store the list of a state's stages beside this host's stages: it tells joiners what they may request."""
        root = await asyncio.to_thread(self._store.put, [canonical(ready.states)])
        self.progress.states[ready.round] = dict(enumerate(ready.states.digests))
        self.progress.roots[ready.round] = root
        self.progress.forget(keep_states=3 * self._manifest.rounds.snapshot_every)
        await self._keeping.retain()

    # Requests of the lead host

    async def _answer(self, ask: boxes.BoxAsk) -> None:
        answer = boxes.BoxAnswer(ask=ask.number)
        try:
            match ask.WhichOneof("what"):
                case "judge":
                    answer.reason, answer.stage = await self._judge(ask.judge)
                case "take":
                    await self._chain_to(ask.take + 1)
                    if (commit := self._chain.commit(ask.take)) is None:
                        raise RemoteError(pb.REASON_UNAVAILABLE, f"commit {ask.take} is not on this disk any more")
                    self._taken[ask.take] = await self._own.take(commit)
                case "keep":
                    answer.holders.extend(await self._own.find_relays(ask.keep.blobs))
                case "start":
                    self._starting[ask.number] = await self._prepare(ask.start.start)
        except RemoteError as error:
            answer.reason, answer.detail = error.reason, error.detail
        finally:
            self._asks.pop(ask.number, None)
        self._send(answer=answer)

    async def _prepare(self, start: worker.Start) -> tuple[worker.Start, list[worker.Apply]]:
        """Return the start with all it needs, and the commits that it replays. They come from this host's chain."""
        await self._chain_to(start.round + start.replays)
        await self._own.with_commits(start)
        return start, await self._own.have(start, lambda why: self._member.show(Status("synchronising", why)))

    async def _judge(self, asked: boxes.AskJudge) -> Verdict:
        contribution: Statement[pb.Contribution] = open_envelope(
            asked.contribution, self._manifest.run_id, (pb.KIND_CONTRIBUTION,)
        )
        self._keeping.judged(contribution.body)
        return await self._own.judge(contribution, asked.base, asked.rank_or_k)

    async def _chain_to(self, length: int) -> None:
        """Wait until this host's chain has this length: it follows the coordinator. Raises RemoteError after a timeout."""
        try:
            async with asyncio.timeout(CHAIN_SECONDS):
                while self._chain.length < length:
                    self._grew.clear()
                    await self._grew.wait()
        except TimeoutError as error:
            why = f"host {short(self._me)} has no commit {length - 1} yet: check that it reaches the coordinator"
            raise RemoteError(pb.REASON_UNAVAILABLE, why) from error
