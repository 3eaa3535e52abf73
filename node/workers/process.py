"""Stage workers as processes: they fork from one that has imported what they need (training/fork_server.py)."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dilocox.transport.process.child_environment import child_environment
from dilocox.transport.process.processes import end_process, start_process

__all__ = ["ForkServer", "WorkerProcess", "ticks_of"]

SERVER = "dilocox.node.training.worker.fork_server"
PROC = Path("/proc")
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Environment of the fork server: libraries start no thread when they are imported, because a fork has only the thread that
forks. Waits sleep: libgomp's threads otherwise spin at every barrier, and take the cores of the daemon and the codec. The
library reads the policy when it is loaded, thus before a worker has an environment of its own."""
WORD_BYTES = 32
"""Size of the fork server's answer: a number."""
WORD_SECONDS = 10.0
"""Timeout of its report of a process's end, which is also seen here; a slower one hangs."""


def ticks_of(pid: int) -> int:
    """Processor time of a process, user and system; 0 where there is none. Source: proc(5)."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


async def _readable(*descriptors: int) -> None:
    """Wait until one of them is readable."""
    found, loop = asyncio.Event(), asyncio.get_running_loop()
    for descriptor in descriptors:
        loop.add_reader(descriptor, found.set)
    try:
        await found.wait()
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)


class WorkerProcess:
    """One of them, from the moment it was asked for."""

    def __init__(self, ours: socket.socket, environment: Mapping[str, str]) -> None:
        """`ours`: connected with the fork server, and for nothing else."""
        self.pid: int | None = None
        """Process id; None until it runs."""
        self._handle: int | None = None
        """A descriptor of the process while it runs: its number may become another's, this does not."""
        self._ours, self._environment = ours, environment
        self._ended: asyncio.Task[int | None] | None = None

    def start(self) -> None:
        """Ask the fork server for it, and follow it."""
        self._ended = asyncio.create_task(self._follow(self._ours, self._environment), name="worker process")

    async def _follow(self, ours: socket.socket, environment: Mapping[str, str]) -> int | None:
        try:
            with ours, contextlib.suppress(OSError, TimeoutError):
                ours.setblocking(False)
                if (status := await self._ask(ours, environment)) is not None:
                    return status
            await self._bury()
            return None
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    async def _ask(self, ours: socket.socket, environment: Mapping[str, str]) -> int | None:
        """Return the fork server's report of the process's end; None if the fork server ended first. Raises TimeoutError
        without a report; OSError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(ours, f"{json.dumps(dict(environment))}\n".encode())
        await _readable(ours.fileno())
        word, handles, _, _ = socket.recv_fds(ours, WORD_BYTES, 1)
        if not word or not handles:
            return None
        self.pid, (self._handle,) = int(word), handles
        await _readable(ours.fileno(), self._handle)
        async with asyncio.timeout(WORD_SECONDS):
            word = await loop.sock_recv(ours, WORD_BYTES)
        return int(word) if word else None

    async def _bury(self) -> None:
        """End a process whose fork server is gone."""
        if self._handle is not None:
            self.kill()
            await _readable(self._handle)
            with contextlib.suppress(ChildProcessError):  # where this is a container's first process it is ours by now
                os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - it has ended

    async def wait(self) -> int | None:
        """Its exit status once it has ended, negative where a signal did it; None where the fork server ended first, or hangs."""
        assert self._ended is not None, "it was started"
        return await asyncio.shield(self._ended)

    @property
    def running(self) -> bool:
        return self._handle is not None

    def ticks(self) -> int:
        """Processor time that it took. Blocking."""
        return ticks_of(self.pid) if self.pid is not None and self.running else 0

    def kill(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class ForkServer:
    """Theirs. Another is started when it has ended, for whatever reason."""

    def __init__(self, log: Path) -> None:
        """`log`: where it prints, and the workers do."""
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._imported: asyncio.Future[bool] | None = None
        """Whether it has everything, once it knows."""
        self._hearing: asyncio.Task[None] | None = None
        self._gone = True
        """It has ended, or does."""

    async def open(self) -> None:
        """Have one; it imports for seconds. Raises OSError."""
        if not self._gone:
            return
        await self.close()
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._log.open("ab") as output:
                self._process = await start_process(
                    *(sys.executable, "-P", "-m", SERVER),
                    env=child_environment(THREADS),
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._gone = False
        self._control, self._imported = ours, asyncio.get_running_loop().create_future()
        self._hearing = asyncio.create_task(self._hear(ours, self._imported), name="fork server")

    async def _hear(self, control: socket.socket, imported: asyncio.Future[bool]) -> None:
        """Read its only message, until it ends."""
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(control, 1):
                imported.set_result(True)
        self._gone = True
        if not imported.done():
            imported.set_result(False)

    async def ready(self) -> bool:
        """Wait until it can fork; return False if it ended before (the log has the reason). Raises OSError."""
        await self.open()
        assert self._imported is not None
        return await asyncio.shield(self._imported)

    def start(self, environment: Mapping[str, str], inherited: Sequence[int] = ()) -> WorkerProcess:
        """Once it is ready. `inherited`: at most one descriptor, the store's socket of the first worker of several boxes. Raises
        OSError where there are no descriptors left."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._log.open("ab") as output:
                socket.send_fds(self._control, [b"w"], [theirs.fileno(), output.fileno(), *inherited])
        except BrokenPipeError:
            self._gone = True  # and so has the worker
        except BaseException:
            ours.close()
            raise
        process = WorkerProcess(ours, environment)
        process.start()
        return process

    def ticks(self) -> int:
        """Processor time that it took. Blocking."""
        return ticks_of(self._process.pid) if self._process is not None and self._process.returncode is None else 0

    async def kill(self) -> None:
        """End the fork server; waiting callers are told."""
        self._gone = True
        if self._process is not None and self._process.returncode is None:
            await end_process(self._process)

    async def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        if self._control is not None:
            self._control.close()
        self._control = self._hearing = self._imported = None
        await self.kill()
