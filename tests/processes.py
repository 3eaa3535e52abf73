"""Processes for tests that need several: what takes seconds to import is imported once, and they fork from there."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

__all__ = ["in_processes"]


def in_processes(work: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What `work`, a function of a module, returns in a process for each of the calls, all at once. Fails as soon as one of them
    ends without; its traceback stands in the test's output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])  # of the first who asks: others import what they lack
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # who forks has one thread
        forkserver.ensure_running()
    running, found = {}, dict[int, Any]()
    for number, call in enumerate(calls):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, work, call), daemon=True)
        process.start()
        theirs.close()
        running[ours] = number, process
    try:
        while running:
            ready = wait(list(running))
            for pipe in [each for each in running if each in ready]:
                number, process = running[pipe]
                try:
                    found[number] = pipe.recv()
                except EOFError:
                    process.join()
                    pytest.fail(f"call {number} of {work.__module__} ended with {process.exitcode}")
                process.join()
                del running[pipe]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return [found[number] for number in range(len(calls))]


def _work(pipe: Connection, work: Callable[..., Any], call: tuple[Any, ...]) -> None:
    pipe.send(work(*call))
