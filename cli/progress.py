"""Progress of a command: one line on a terminal that disappears at the end; nothing off a terminal.

Everything that may take over two seconds runs inside `working`, and names its work.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from dilocox.cli import common

__all__ = ["Working", "working"]

T = TypeVar("T")


class Working:
    """Description of the work in progress."""

    def __init__(self, bar: Progress, what: str, total: float | None) -> None:
        self._bar, self._task = bar, bar.add_task(what, total=total)

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def begin(self, what: str, total: float | None = None) -> None:
        """Begin another piece of work. `total` None: its amount is unknown."""
        self._bar.reset(self._task, description=what, total=total)

    def at(self, done: float, total: float | None = None) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def more(self, done: float) -> None:
        self._bar.advance(self._task, done)

    def each(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield the items, and advance the bar for each."""
        self.begin(what, total)
        for done, item in enumerate(items):
            self.at(done)
            yield item


class _Bar(BarColumn):
    """Bar that is empty while the amount is unknown."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.total is not None else Text()


class _Remaining(TimeRemainingColumn):
    """Estimated time that is left; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        if task.total is None or task.time_remaining is None:
            return Text()
        return super().render(task).append(" left")


@contextmanager
def working(what: str, total: float | None = None, bytes: bool = False) -> Iterator[Working]:
    """`bytes`: what is counted; else steps."""
    rate: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    counted: list[ProgressColumn] = (
        rate if bytes else [TimeElapsedColumn(Column(no_wrap=True)), _Remaining(table_column=Column(no_wrap=True))]
    )
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False), _Bar(), *counted]
    # Output printed during the work appears above the line, unless it goes elsewhere.
    ours = sys.stdout.isatty()
    with Progress(*columns, console=common.errors, transient=True, redirect_stdout=ours, disable=not on_terminal()) as bar:
        yield Working(bar, what, total)


def on_terminal() -> bool:
    return sys.stderr.isatty()
