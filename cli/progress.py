"""What somebody who waits for a verb sees: one line on a terminal, which goes when it is done; off a terminal nothing.

Whatever may take over two seconds runs inside `working`, and says what it does.
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
    """What is being done."""

    def __init__(self, bar: Progress, what: str, total: float | None) -> None:
        self._bar, self._task = bar, bar.add_task(what, total=total)

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def begin(self, what: str, total: float | None = None) -> None:
        """Something else; `total`: None where nobody knows how much it is."""
        self._bar.reset(self._task, description=what, total=total)

    def at(self, done: float, total: float | None = None) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def more(self, done: float) -> None:
        self._bar.advance(self._task, done)

    def each(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """These, told one by one."""
        self.begin(what, total)
        for done, item in enumerate(items):
            self.at(done)
            yield item


class _Bar(BarColumn):
    """Leaves the line to the words where nobody knows how much there is."""

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
    # What is printed meanwhile stands above the line, unless somebody else reads it.
    ours = sys.stdout.isatty()
    with Progress(*columns, console=common.errors, transient=True, redirect_stdout=ours, disable=not on_terminal()) as bar:
        yield Working(bar, what, total)


def on_terminal() -> bool:
    return sys.stderr.isatty()
