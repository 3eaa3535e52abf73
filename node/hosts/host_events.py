"""Events of the workers of one worker group, on all hosts of a cluster."""

import asyncio

from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import worker_pb2 as worker

__all__ = ["HostEvents"]


class HostEvents:
    """Events of the workers of all hosts. `queue` yields them in order per worker; None when the worker group has ended on
    all hosts.

    The service that other hosts call adds theirs as soon as this daemon serves; `put` adds the lead host's.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[int, worker.WorkerEvent] | None] = asyncio.Queue()
        self.group = 0
        """Number of the worker group."""
        self.workers = 0
        """Number of workers in this worker group; 0: not launched yet."""
        self.phases = 0
        """Local phases that its workers ended."""
        self.failure = ""
        """Why a worker of another host failed."""

    def begin(self) -> int:
        """Return the number of a new worker group; what workers of earlier ones say is dropped from now on."""
        self.group += 1
        self.workers, self.phases, self.failure = 0, 0, ""
        return self.group

    def launch(self, workers: int) -> None:
        self.workers = workers

    def end(self) -> None:
        self.queue.put_nowait(None)

    def put(self, rank: int, event: worker.WorkerEvent) -> None:
        self.phases += event.HasField("boundary")
        self.queue.put_nowait((rank, event))

    def hear(self, said: boxes.WorkerSaid) -> None:
        """Add a message of a worker on another host."""
        if said.generation != self.group or said.rank >= self.workers:
            return
        if said.event.HasField("failed"):
            self.failure = f"a worker of another host failed: {said.event.failed}"
        self.put(said.rank, said.event)
