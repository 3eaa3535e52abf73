"""Starts and watches the stage workers: one elastic launcher, one gRPC stream per worker over a Unix socket.

A generation is one launch. When any worker or the launcher dies, the whole generation is ended (its parent pipe is closed), and the
daemon starts the next one from the last boundary: one path for every kind of death.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.errors import LocalError
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.pb import worker_pb2_grpc as rpc
from dilocox.transport.parent_pipe import ParentPipe

__all__ = ["WorkerPool"]

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES = 100
"""Linux allows 107 bytes for the path of a Unix socket."""
STOP_SECONDS = 10.0
"""A worker finishes its inner step and exits; after this it is killed."""
_OPTIONS = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES),
]


@dataclass
class Attached:
    hello: pb.Hello
    commands: asyncio.Queue[pb.WorkerCommand] = field(default_factory=asyncio.Queue)


class WorkerPool(rpc.SupervisorServicer):
    """`events` yields what workers say, in order per worker; None when the generation has ended."""

    def __init__(self, folder: Path, workers: int, environment: Callable[[str], dict[str, str]]) -> None:
        """`environment(socket path)` gives the workers' settings. Raises LocalError when the socket's path is too long."""
        self._folder, self.workers, self._environment = folder, workers, environment
        self._socket = folder / "w.sock"
        if len(str(self._socket)) > SOCKET_PATH_BYTES:
            raise LocalError(f"the path {self._socket} is too long for a Unix socket. Use a shorter --home.")
        self._server: grpc.aio.Server | None = None
        self._attached: dict[int, Attached] = {}
        self.events: asyncio.Queue[tuple[int, pb.WorkerEvent] | None] = asyncio.Queue()
        self._parent_pipe: ParentPipe | None = None
        self._launcher: asyncio.subprocess.Process | None = None
        self.pids: list[int] = []

    async def open(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = grpc.aio.server(options=_OPTIONS)
        rpc.add_SupervisorServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        self._socket.chmod(0o600)

    async def run_generation(self) -> None:
        """Launch, and return when the generation has ended, leaving no process of it."""
        self._parent_pipe = ParentPipe(self._folder)
        self._attached.clear()
        log_path = self._folder / "workers.log"
        environment = {**self._parent_pipe.environment(), **self._environment(str(self._socket))}
        with log_path.open("ab") as output:
            self._launcher = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "dilocox.node.training.launch",
                str(self.workers),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            await self._launcher.wait()
        finally:
            self.end_generation()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.pids = []
            await self._launcher.wait()
            self.events.put_nowait(None)

    def end_generation(self) -> None:
        """Make every process of this generation exit at once."""
        if self._parent_pipe is not None:
            self._parent_pipe.close()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.WorkerEvent], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerCommand]:
        first = await anext(request_iterator)
        attached = Attached(first.hello)
        self._attached[first.hello.rank] = attached
        self.pids.append(first.hello.pid)
        self.events.put_nowait((first.hello.rank, first))

        async def receive() -> None:
            async for event in request_iterator:
                self.events.put_nowait((first.hello.rank, event))

        receiving = asyncio.create_task(receive(), name=f"worker {first.hello.rank}")
        try:
            while True:
                command = asyncio.create_task(attached.commands.get())
                done, _ = await asyncio.wait({command, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if command not in done:
                    command.cancel()
                    return
                yield command.result()
        finally:
            receiving.cancel()

    def command(self, command: pb.WorkerCommand) -> None:
        """To every worker of the generation."""
        for attached in self._attached.values():
            attached.commands.put_nowait(command)

    async def stop(self) -> None:
        """Let the workers finish their step, then make sure nothing is left."""
        if self._launcher is not None and self._launcher.returncode is None:
            self.command(pb.WorkerCommand(stop=pb.Stop()))
            if len(self._attached) < self.workers:
                self.end_generation()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._launcher.wait()
        self.end_generation()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.5)
        self._socket.unlink(missing_ok=True)
