"""Fixtures that several suites share."""

import importlib.metadata
import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from dilocox.cli import commands
from dilocox.node.attest import kinds
from dilocox.testnet.swarm import ANY_PORTS

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
"""A machine that is busy is no reason for a test to fail."""

MOST_BYTES = 12 << 30
"""Bytes of memory, for each process of a test."""


@pytest.fixture(scope="session", autouse=True)
def _memory() -> None:
    """Limit the memory: a test without bounds ends with MemoryError and its name, and the kernel kills no other process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > MOST_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, hard))


@pytest.fixture(scope="session", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use another library: no test reads or writes the ~/.dilocox of the person who runs it."""
    os.environ["DILOCOX_HOME"] = str(tmp_path_factory.mktemp("home"))


def left_out(reasons: Sequence[str], deselected: int) -> str:
    """Return a line with the tests that a run left out, and the reasons."""
    counted = sorted(Counter(reasons).items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count} skipped ({reason})" for reason, count in counted]
    if deselected:
        parts.append(f"{deselected} for `make test-all`")
    return f"left out: {'; '.join(parts) or 'nothing'}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the tests left out at the end: a passed gate has not checked them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])]
    reporter.write_line(left_out(skipped, len(reporter.stats.get("deselected", []))))


@pytest.fixture
def any_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let daemons of the test listen on any free ports: several tests run at once."""
    for variable, value in ANY_PORTS.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """Start torch.distributed with this process alone, for a pipeline of one worker."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # small models: a second thread mostly waits, and on a busy machine for very long
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


class Installed:
    """A distribution that is installed, with the text of its entry points."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, entry_points: str, summary: str = "A plugin.") -> None:
        info = self._folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: {summary}\n")
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Installed]:
    """No plugin is installed but those that a test adds."""
    folder = tmp_path / "site"
    folder.mkdir()
    distributions = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: distributions(path=[str(folder)]))
    caches = (commands.plugins, kinds.plug_ins)
    for cache in caches:
        cache.cache_clear()
    yield Installed(folder)
    for cache in caches:
        cache.cache_clear()
