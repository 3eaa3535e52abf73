"""Fork server: imports the workers' modules once and forks workers, which then start in hundredths of a second. Imports of
torch and transformers take seconds.

The daemon (../worker_process.py) starts it with a connected socket as standard input. It has one thread and does not
touch a GPU: neither would survive a fork. A request is a byte, with the descriptors of a socket for the worker and of
its output. That socket receives its environment, as a line of JSON; back come its number with a descriptor, and at the
end its status. The server ends when the daemon closes its end, or dies.
"""

import contextlib
import json
import os
import select
import socket
from pathlib import Path

from dilocox.node.workers.environment import STORE_SOCKET, WORKER
from dilocox.transport.process.malloc import freeze_startup

__all__ = ["serve_daemon"]

READY = b"r"
"""Message to the daemon after all imports."""
DESCRIPTORS = 3
"""Most descriptors of a request: the worker's socket, its output, and the store's socket for the first worker of several
hosts."""
COMM = Path("/proc/self/comm")


def serve(control: socket.socket) -> bool:
    """Fork workers, and report their ends. Returns True in every worker, and False when the daemon is gone."""
    running: dict[int, tuple[int, socket.socket]] = {}
    """Process numbers and sockets, by a descriptor that becomes readable when the process ends."""
    while True:
        ready, _, _ = select.select([control.fileno(), *running], [], [])
        for ended in running.keys() & set(ready):
            pid, theirs = running.pop(ended)
            _, status = os.waitpid(pid, 0)
            _tell(theirs, os.waitstatus_to_exitcode(status))
            theirs.close()
            os.close(ended)
        if control.fileno() not in ready:
            continue
        word, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
        if not word:
            return False
        theirs = socket.socket(fileno=descriptors[0])
        with theirs.makefile("r") as words:
            line = words.readline()
        if not line:
            return False
        pid = os.fork()
        if pid == 0:
            for ended, (_, others) in running.items():
                os.close(ended)
                others.close()
            control.close()
            theirs.close()
            _become(json.loads(line), *descriptors[1:])
            return True
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        running[handle] = pid, theirs
        _tell(theirs, pid, handle)


def _tell(theirs: socket.socket, number: int, *handles: int) -> None:
    with contextlib.suppress(OSError):  # the daemon is gone, and with it its end of `control`
        socket.send_fds(theirs, [str(number).encode()], handles)


def _become(environment: dict[str, str], output: int, store: int | None = None) -> None:
    """Prepare a forked process: session, environment, name and standard streams."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    for descriptor in (nothing, output):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if store is not None:
        os.environ[STORE_SOCKET] = str(store)
    with contextlib.suppress(OSError):  # it is but a name
        COMM.write_text(WORKER)


def serve_daemon() -> bool:
    """Run `serve` on standard input, after all imports."""
    control = socket.socket(fileno=os.dup(0))
    freeze_startup()  # else the collector writes to all that was imported, and every worker has a copy of it
    control.sendall(READY)
    return serve(control)


if __name__ == "__main__":
    from dilocox.node.training.worker import worker

    if serve_daemon():
        worker.main()
