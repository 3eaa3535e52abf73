"""A run on one machine to its end: the link that works there alone, an export before any training, nodes that end by themselves."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENCE_SECONDS, build

pytestmark = pytest.mark.e2e


def dilocox(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dilocox.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_run_with_exit_when_finished_ends_its_nodes_and_exports_its_beginning_as_untrained(tmp_path: Path):
    testnet = build(tmp_path, count=1, options=["--exit-when-finished"])
    testnet.start_all()
    try:
        link = testnet.folder / "link"
        checked = dilocox("check", f"@{link}", "--json", "--home", str(tmp_path / "new"))
        [found] = [each for each in json.loads(checked.stdout)["findings"] if each["about"] == "link"]
        assert found["level"] == "odd"
        assert "--host" in found["do"]
        for member in testnet.nodes:
            assert testnet.processes[member.name].wait(PATIENCE_SECONDS) == 0, testnet.last_words(member)
        home = str(testnet.nodes[0].home)
        for words, trained in ((["--round", "1"], False), ([], True)):
            target = tmp_path / f"model-{trained}"
            exported = dilocox("export", str(target), "--home", home, *words)
            assert exported.returncode == 0, exported.stderr
            assert bool(re.search("is not trained", exported.stdout)) != trained
    finally:
        testnet.stop()
