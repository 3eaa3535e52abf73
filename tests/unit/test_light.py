"""Tests that frequent verbs start at once: they hold the modules that these may not load, on a busy machine too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.cli.commands import PANELS, VERBS
from dilocox.transport.store.data_directory import DataDirectory

HEAVY = (
    "aiohttp",
    "cryptography",
    "dilocox.protocol.consensus.chain",
    "dilocox.protocol.run.manifest",
    "dilocox.transport.store.chain_file",
    "dilocox.transport.net.rpc",
    "grpc",
    "hivemind",
    "numpy",
    "prometheus_client",
    "torch",
    "transformers",
)
"""Modules that take a tenth of a second or more, with their imports."""


def loaded(folder: Path, *arguments: str) -> set[str]:
    script = (
        "import atexit, sys\n"
        f"sys.argv = ['dilocox', *{list(arguments)!r}]\n"
        f"atexit.register(lambda: print('loaded', *(name for name in {HEAVY!r} if name in sys.modules)))\n"
        "from dilocox.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], text=True, capture_output=True, env={**os.environ, "DILOCOX_HOME": str(folder)}
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    return set(line.split()[1:])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status"], ["status", "--json"], ["pause"], ["peers"]])
def test_it_loads_nothing_heavy(tmp_path: Path, arguments: list[str]):
    assert loaded(tmp_path, *arguments) == set()


def test_a_status_of_a_daemon_that_runs_loads_nothing_heavy(tmp_path: Path):
    """Check a daemon that does not answer: the request is the same."""
    home = DataDirectory(tmp_path / "node")
    home.announce(role="node", api="http://127.0.0.1:1")
    try:
        assert loaded(tmp_path, "status") == set()
    finally:
        home.close()


def test_the_panels_of_the_help_list_every_verb_once():
    listed = [name for verbs in PANELS.values() for name in verbs]
    assert sorted(listed) == sorted(VERBS)
