"""Test of every command of the README as a reader types it, in its order. tests/unit/test_docs.py checks that options
exist."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENCE_SECONDS, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.usefixtures("any_ports")]

ROOT = Path(__file__).parents[2]
GOES_ON = {"events -f", "coordinator"}
"""Verbs that end only at a signal."""


def blocks() -> list[list[str]]:
    """Return the typed lines, without comments."""
    found = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    two_machines = "FIRST", "SECOND"  # tests/e2e/test_two_machines.py plays them
    found = [block for block in found if not any(name in block for name in two_machines) and not block.startswith("git clone")]
    lines = [block.replace("\\\n", " ").splitlines() for block in found]
    return [[line.partition("  #")[0].strip() for line in block if line.strip()] for block in lines]


def words(line: str) -> list[str]:
    """Return the words to run instead of `dilocox …`."""
    said = shlex.split(line.replace("YOUR.PUBLIC.ADDRESS", "127.0.0.1"))
    assert said[0].removeprefix(".venv/bin/") == "dilocox", f"nobody runs {line}"
    return [sys.executable, "-P", "-m", "dilocox.cli.main", *said[1:]]


def run(line: str, folder: Path) -> None:
    """Run a line as a person does: a command that continues is stopped after its first line."""
    if line.startswith("make "):
        assert subprocess.run(["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True).returncode == 0
        return
    if line.startswith("docker "):
        return  # an engine is needed, as `make docker` reports
    command = words(line)
    if not any(" ".join(command[4:]).startswith(verb) for verb in GOES_ON):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as going:
        assert going.stdout is not None
        assert going.stdout.readline().strip(), f"{line}: it says nothing"
        going.send_signal(signal.SIGTERM)
        going.wait(timeout=PATIENCE_SECONDS)


@pytest.fixture
def testnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run the processes of `make testnet`, in a separate home."""
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))
    up = words("dilocox testnet up --detach")
    subprocess.run(up, check=True, timeout=PATIENCE_SECONDS)
    try:
        yield tmp_path
    finally:
        subprocess.run(words("dilocox testnet down"), check=True, timeout=PATIENCE_SECONDS)


def test_the_commands_beside_a_testnet(testnet: Path):
    first, beside, *_ = blocks()
    assert first == ["make testnet", "make test"]
    for line in first:
        run(line, testnet)

    def fourth() -> bool:
        asked = subprocess.run([*words("dilocox rounds 4")], capture_output=True, timeout=PATIENCE_SECONDS)
        return asked.returncode == 0

    wait_for(fourth, "four rounds closed")
    assert any("rounds 3 --why" in line for line in beside)
    for line in beside:
        run(line, testnet)


def test_the_commands_of_a_run_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))
    texts = tmp_path / "TEXTS"
    texts.mkdir()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        shutil.copyfile(path, texts / path.with_suffix(".txt").name)
    for block in blocks()[2:]:
        for line in block:
            run(line, tmp_path)
