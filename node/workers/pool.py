"""Pool of this host's workers: one process per rank, one gRPC stream per worker over a Unix socket.

A worker group is one launch. When any worker dies, the whole group is stopped (its parent pipe closes), and the daemon
starts the next one from the last checkpoint: one path for every kind of death. The workers of one host meet by a file
and use loopback: no other machine can reach them. Those of several hosts exchange tensors over the interface that the
operator named.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from dilocox.node.workers.environment import RENDEZVOUS, STORE_PORT
from dilocox.node.workers.process import ForkServer, WorkerProcess
from dilocox.protocol import limits
from dilocox.protocol.errors import LocalError
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.pb import worker_pb2_grpc as rpc
from dilocox.transport.limits.caller_auth import Context
from dilocox.transport.process.parent_pipe import ParentPipe

__all__ = ["Launch", "WorkerPool"]

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES = 100
"""Linux allows 107 bytes for the path of a Unix socket."""
STOP_SECONDS = 10.0
"""A worker finishes its inner step and exits; after this it is killed."""
LOOPBACK = "lo"
"""The interface on which gloo and NCCL exchange tensors between workers of this box."""
_OPTIONS = [
    ("grpc.max_receive_message_length", limits.WORKER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.WORKER_MESSAGE_BYTES),
]


@dataclass(frozen=True)
class Launch:
    """This box's part of a generation."""

    ranks: Sequence[int]
    """Ranks of its workers."""
    workers: int
    """Number of workers on all hosts."""
    copies: int
    """Copies of the pipeline."""
    microbatches: int = 1
    """Microbatches of an inner step, of all copies."""
    recompute: bool = False
    """True if activations are computed again for the backward pass."""
    store_port: int | None = None
    """Loopback port at which the workers of several hosts meet; None: one host, which uses a file."""
    store: socket.socket | None = None
    """Listening socket of that store, on the first worker's host."""
    interface: str = LOOPBACK
    """Interface of gloo and NCCL."""


@dataclass
class Attached:
    hello: pb.Hello
    commands: asyncio.Queue[pb.WorkerCommand] = field(default_factory=asyncio.Queue)


class WorkerPool(rpc.SupervisorServicer):
    """`events` yields what workers say, in order per worker; None when the generation has ended."""

    def __init__(self, folder: Path, environment: Callable[[str, Launch], dict[str, str]]) -> None:
        """`environment(socket path, launch)` gives the workers' settings. Raises LocalError when the socket's path is too long."""
        self._folder, self._environment = folder, environment
        self._socket = folder / "w.sock"
        if len(os.fsencode(self._socket)) > SOCKET_PATH_BYTES:
            raise LocalError(f"the path {self._socket} is too long for a Unix socket. Use a shorter --home.")
        self._server: grpc.aio.Server | None = None
        self._attached: dict[int, Attached] = {}
        self.events: asyncio.Queue[tuple[int, pb.WorkerEvent] | None] = asyncio.Queue()
        self._parent_pipe: ParentPipe | None = None
        self._fork_server = ForkServer(folder / "workers.log")
        self._processes: list[WorkerProcess] = []
        """Processes of this worker group."""
        self._given_up = asyncio.Event()
        """Event, set when this worker group should end, whether its processes notice or not."""
        self._ended = asyncio.Event()
        """No generation runs."""
        self._ended.set()
        self._stopping = False
        self._expected = 0
        """Workers of this generation, started yet or not."""

    async def open(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = grpc.aio.server(options=_OPTIONS)
        rpc.add_SupervisorServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        self._socket.chmod(0o600)
        await self._fork_server.open()  # it imports while the run is joined

    async def run_generation(self, launch: Launch) -> None:
        """Return when the generation has ended, leaving no process of it."""
        self._ended.clear()
        self._given_up.clear()
        self._stopping, self._expected = False, len(launch.ranks)
        self._attached.clear()
        self._processes = []
        try:
            self._parent_pipe = ParentPipe(self._folder)
            with self._rendezvous() as meeting:
                if await self._ready():
                    for local in range(len(launch.ranks)):
                        self._processes.append(self._start(launch, local, meeting))
                    await self._first_death()
        finally:
            self.end_generation()
            await self._bury()
            self._ended.set()
            self.events.put_nowait(None)

    async def _ready(self) -> bool:
        """Whether workers can be started, and are still wanted."""
        given_up = asyncio.create_task(self._given_up.wait())
        ready = asyncio.create_task(self._fork_server.ready())
        try:
            await asyncio.wait({ready, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self._fork_server.kill()  # perhaps it hangs
            return ready.done() and await ready
        finally:
            ready.cancel()
            given_up.cancel()

    async def _bury(self) -> None:
        """Nothing of the generation is left, nor a fork server that does not say so."""
        waiting = asyncio.gather(*(process.wait() for process in self._processes), return_exceptions=True)
        while not waiting.done():
            for process in self._processes:
                process.kill()
            done, _ = await asyncio.wait({waiting}, timeout=STOP_SECONDS)
            if not done:
                await self._fork_server.kill()
        if not all(isinstance(status, int) for status in waiting.result()):
            await self._fork_server.kill()

    @contextlib.contextmanager
    def _rendezvous(self) -> Iterator[Path]:
        """Yield a new file name, in a folder that only this user may enter; it is removed afterwards."""
        folder = self._folder / "rendezvous"
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        for leftover in folder.iterdir():
            leftover.unlink()
        path = folder / os.urandom(8).hex()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _start(self, launch: Launch, local: int, meeting: Path) -> WorkerProcess:
        assert self._parent_pipe is not None
        settings, rank = self._environment(str(self._socket), launch), launch.ranks[local]
        environment = {"OMP_NUM_THREADS": settings["DILOCOX_WORKER_THREADS"], **self._parent_pipe.environment(), **settings}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(launch.workers)}
        environment |= {"GLOO_SOCKET_IFNAME": launch.interface, "NCCL_SOCKET_IFNAME": launch.interface}
        if launch.store_port is None:
            environment[RENDEZVOUS] = str(meeting)
        else:
            environment[STORE_PORT] = str(launch.store_port)
        inherited = [launch.store.fileno()] if launch.store is not None and rank == 0 else []
        return self._fork_server.start(environment, inherited)

    async def _first_death(self) -> None:
        """Wait until a worker ends, or all should. Workers that stop on command all get their time."""
        given_up = asyncio.create_task(self._given_up.wait())
        running: set[asyncio.Task[Any]] = {asyncio.create_task(process.wait()) for process in self._processes}
        try:
            while running:
                done, left = await asyncio.wait({*running, given_up}, return_when=asyncio.FIRST_COMPLETED)
                running = left - {given_up}
                if given_up in done or not self._stopping or any(task.result() != 0 for task in done):
                    return
        finally:
            for task in {*running, given_up}:
                task.cancel()

    def processor_ticks(self) -> int:
        """Processor time of this generation so far, and of what imports for it, in clock ticks. Blocking."""
        return self._fork_server.ticks() + sum(process.ticks() for process in self._processes)

    def end_generation(self) -> None:
        """Make every process of this worker group exit at once; one that hangs, or is suspended, is killed."""
        self._given_up.set()
        if self._parent_pipe is not None:
            self._parent_pipe.close()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.WorkerEvent], context: Context
    ) -> AsyncIterator[pb.WorkerCommand]:
        first = await anext(request_iterator)
        attached = Attached(first.hello)
        self._attached[first.hello.rank] = attached
        self.events.put_nowait((first.hello.rank, first))

        async def receive() -> None:
            async for event in request_iterator:
                self.events.put_nowait((first.hello.rank, event))

        receiving = asyncio.create_task(receive(), name=f"worker {first.hello.rank}")
        command = asyncio.create_task(attached.commands.get())
        try:
            while True:
                done, _ = await asyncio.wait({command, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if command not in done:
                    return
                yield command.result()
                command = asyncio.create_task(attached.commands.get())
        finally:
            receiving.cancel()
            command.cancel()

    def command(self, command: pb.WorkerCommand) -> None:
        """Send a command to every worker of the group."""
        for attached in self._attached.values():
            attached.commands.put_nowait(command)

    async def stop(self) -> None:
        """Let the workers finish their step, then make sure nothing is left."""
        self._stopping = True
        if not self._ended.is_set():
            self.command(pb.WorkerCommand(stop=pb.Stop()))
            if len(self._attached) < self._expected:
                self.end_generation()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._ended.wait()
        self.end_generation()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.5)
        await self._fork_server.close()
        self._socket.unlink(missing_ok=True)
