"""Processes for tests that need several: what takes seconds to import is imported once, and they fork from there."""

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

__all__ = ["in_processes"]

PATIENCE_SECONDS = 600.0
"""Seconds that all processes may spend without a message."""


def in_processes(work: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work`, a function of a module, in a process for each of the calls, all at once; return the results. Fails as
    soon as one ends without a result; the test's output has its traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, work.__module__])  # modules of the first caller: others import their missing ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a process that forks has one thread
        forkserver.ensure_running()
    running, found = {}, dict[int, Any]()
    try:
        for number, call in enumerate(calls):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, work, call), daemon=True)
            process.start()
            theirs.close()
            running[ours] = number, process
        while running:
            ready = wait(list(running), PATIENCE_SECONDS)
            assert ready, f"calls {sorted(number for number, _ in running.values())} of {work.__module__} do not end"
            for pipe in [each for each in running if each in ready]:
                number, process = running[pipe]
                with contextlib.suppress(EOFError):
                    found[number] = pipe.recv()
                process.join(PATIENCE_SECONDS)
                assert number in found, f"call {number} ended with {process.exitcode}"
                assert process.exitcode == 0, f"call {number}"
                del running[pipe]
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return [found[number] for number in range(len(calls))]


def _work(pipe: Connection, work: Callable[..., Any], call: tuple[Any, ...]) -> None:
    pipe.send(work(*call))
