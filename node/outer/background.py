"""Background jobs beside training, one at a time in one low-priority thread: encoding, checkpoints, applying commits.

One thread and a queue make the order simple: a phase is encoded before a later commit changes the state, and the main
thread asks `idle` before it ends the next phase.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["Background"]

NICENESS = 5
"""Training goes first where cores are scarce."""

T = TypeVar("T")


class Background:
    def __init__(self, cpus: Sequence[int] = (), device: torch.device | None = None) -> None:
        """Start the thread. `cpus`: its cores; empty: any. `device`: the worker's; on a GPU, jobs have their own stream."""
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="outer", initializer=self._settle, initargs=(tuple(cpus),))
        self._pending: list[Future[object]] = []
        self.cpu_seconds = 0.0
        """Spent by finished jobs."""

    def _settle(self, cpus: Sequence[int]) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        future = self._pool.submit(self._timed, job)
        self._pending.append(future)  # type: ignore[arg-type]
        return future

    def aside(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job that no phase waits for, because it changes nothing. Its result raises its errors."""
        return self._pool.submit(self._timed, job)

    def _timed(self, job: Callable[[], T]) -> T:
        start = time.thread_time()
        try:
            with torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))  # what training asked for before
                done = job()
            if self._stream is not None:
                self._stream.synchronize()
            return done
        finally:
            self.cpu_seconds += time.thread_time() - start

    def close(self) -> None:
        """Wait for all jobs."""
        self._pool.shutdown()

    @property
    def idle(self) -> bool:
        """Whether every job is done. Raises what a job raised."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        return not self._pending
