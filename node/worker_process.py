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

__all__ = ["ForkServer", "WorkerProcess", "ticks_of"]

SERVER = "dilocox.node.training.fork_server"
PROC = Path("/proc")


def ticks_of(pid: int) -> int:
    """Processor time of a process, user and system; 0 where there is none. Source: proc(5)."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


class WorkerProcess:
    """One of them, from the moment it was asked for."""

    def __init__(self, ours: socket.socket, environment: Mapping[str, str]) -> None:
        """`ours`: connected with the fork server, and for nothing else."""
        self.pid: int | None = None
        """None until it runs."""
        self._handle: int | None = None
        """A descriptor of the process while it runs: its number may become another's, this does not."""
        self._ended = asyncio.create_task(self._follow(ours, environment), name="worker process")

    async def _follow(self, ours: socket.socket, environment: Mapping[str, str]) -> int:
        try:
            status = await self._ask(ours, environment)
            return status if status is not None else await self._orphaned()
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    async def _ask(self, ours: socket.socket, environment: Mapping[str, str]) -> int | None:
        """What the fork server says of its end; None where that ended first."""
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(f"{json.dumps(dict(environment))}\n".encode())
            if line := await reader.readline():
                self.pid = int(line)
                with contextlib.suppress(ProcessLookupError):  # it has ended already: its status comes
                    self._handle = os.pidfd_open(self.pid)
            line = await reader.readline()
            return int(line) if line else None
        except ConnectionError:
            return None
        finally:
            writer.close()

    async def _orphaned(self) -> int:
        """End it: nobody would tell how it goes on."""
        self.kill()
        if self._handle is not None:
            gone, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(self._handle, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(self._handle)
        return -signal.SIGKILL

    async def wait(self) -> int:
        """Its exit status, negative where a signal ended it; that of SIGKILL where nobody could tell."""
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
        self._imported: asyncio.Task[bool] | None = None

    async def open(self) -> None:
        """Have one; it imports for seconds. Raises OSError."""
        if self._process is not None and self._process.returncode is None:
            return
        await self.close()
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", SERVER),
                    env={**os.environ, "OMP_NUM_THREADS": "1"},  # libraries start no threads: who forks has one
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._control = ours
        self._imported = asyncio.create_task(self._hear(ours), name="fork server")

    async def _hear(self, control: socket.socket) -> bool:
        try:
            return bool(await asyncio.get_running_loop().sock_recv(control, 1))
        except OSError:
            return False

    async def ready(self) -> bool:
        """Wait until it can fork; False where it ended before (why stands in the log). Raises OSError."""
        await self.open()
        assert self._imported is not None
        return await asyncio.shield(self._imported)

    def start(self, environment: Mapping[str, str], inherited: Sequence[int] = ()) -> WorkerProcess:
        """Once it is ready. `inherited`: at most one descriptor, the store's socket of the first worker of several boxes."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as output, contextlib.suppress(OSError):  # it has ended: so has the worker
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), output.fileno(), *inherited])
        return WorkerProcess(ours, environment)

    def ticks(self) -> int:
        """Processor time that it took. Blocking."""
        return ticks_of(self._process.pid) if self._process is not None and self._process.returncode is None else 0

    async def kill(self) -> None:
        """It does not answer: whoever waits for its word hears that it is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        if self._imported is not None:
            self._imported.cancel()
            await asyncio.gather(self._imported, return_exceptions=True)
        if self._control is not None:
            self._control.close()
            self._control = None
        await self.kill()
