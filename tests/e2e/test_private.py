"""Test of examples/private-finetune, command by command: three sites, private data, one model that is better than each
site's own."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.node.data.privacy_budget import Steps, epsilon_of
from dilocox.node.data.tokenizers import train_tokenizer
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import corpus_in, last_built
from tests.corpora import words
from tests.e2e.conftest import PATIENCE_SECONDS
from tests.e2e.test_your_model import make_hub, make_smaller

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "examples" / "private-finetune" / "README.md"
SITES = {"SITE-A": "ABCDEFGH", "SITE-B": "IJKLMNOP", "SITE-C": "QRSTUVWX"}
"""Letters of each site's text; the shared text has those of all sites."""


SMALLER = {r"^count = .*$": "count = 8", r"^synchronous_rounds = .*$": "synchronous_rounds = 8"}
"""Smaller settings. No cluster trains beside an exchange, so the run file decides the steps of a round, not the machine."""


def write(folder: Path, letters: str, number: int) -> None:
    """Write a text in a language of these letters."""
    alike = words(3, 60, number)
    spelt = [re.sub(r"[a-z]", lambda found: letters[ord(found[0]) % len(letters)], text) for text in alike]
    (folder / f"{letters}-{number}.txt").write_text("\n".join(spelt))


def run_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *testnet: str) -> dict[str, str]:
    """Run the example; return the output of each verb. `testnet`: more options of this verb, which is then the last one."""
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))
    make_hub(tmp_path / "HUB")
    (tmp_path / "HUB/tokenizer.json").write_text(train_tokenizer(["ABCDEFGH IJKLMNOP QRSTUVWX " * 9], 300))
    (tmp_path / "SHARED").mkdir()
    for site, letters in SITES.items():
        (tmp_path / site).mkdir()
        for number in range(60):
            write(tmp_path / site, letters, number)
        for number in range(1000, 1060):
            write(tmp_path / "SHARED", letters, number)
    commands = re.findall(r"^dilocox .*$", "\n".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)), re.MULTILINE)
    said: dict[str, str] = {}
    for command in commands:
        verb = command.split()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "dilocox.cli.main",
                *shlex.split(command)[1:],
                *(testnet if verb == "testnet" else ()),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, (command, done.stdout)
        said[verb] = said.get(verb, "") + done.stdout
        if verb == "testnet" and testnet:
            break
        if verb == "init":
            make_smaller(tmp_path / "clinics.toml", SMALLER)
    return said


def test_the_example_s_commands_make_a_model_that_beats_each_site_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = run_example(tmp_path, monkeypatch)
    [common] = re.findall(r"committed model after \d+ inner steps: ([0-9.]+)", said["testnet"])
    alone = re.findall(r"DATA-[ABC] alone after \d+ inner steps: ([0-9.]+)", said["testnet"])
    assert len(alone) == 3
    assert float(common) < min(map(float, alone)), said["testnet"]
    assert "every node has the same state hash after every round" in said["testnet"]
    _nothing_of_it_left(tmp_path)


def _nothing_of_it_left(folder: Path) -> None:
    """Check that no folder contains a data shard of a site."""
    for site in ("DATA-A", "DATA-B", "DATA-C"):
        corpus = corpus_in(BlobStore(folder / site, ours=False), last_built(folder / site))
        assert corpus is not None
        names = {shard.digest for shard in (*corpus.training, *corpus.held_out)}
        assert not [path for path in (folder / "home/testnet").rglob("*") if path.name in names]


@pytest.mark.thorough
def test_a_budget_is_spent_and_kept_and_no_loss_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = run_example(tmp_path, monkeypatch, "--private-epsilon", "8", "--private-clip", "0.5", "--no-baseline")
    assert "every node has the same state hash after every round" in said["testnet"]
    accounts = sorted((tmp_path / "home/testnet").glob("*/privacy.json"))
    assert len(accounts) == 3
    run = Manifest.from_toml((tmp_path / "clinics.toml").read_text())
    for path in accounts:
        [kept] = json.loads(path.read_text())["corpora"].values()
        [noise] = kept["noise"].values()
        assert sum(each["count"] for each in kept["steps"]) >= run.rounds.count * run.rounds.inner_steps * 0.9
        assert 1 < epsilon_of([Steps(**each) for each in kept["steps"]], 1e-4) <= 8
        assert noise > 0.5
    [path] = (tmp_path / "home/testnet/coordinator").rglob("chain.db")
    chain = ChainFile(path, run)
    commits = [commit for number in range(chain.length) if (commit := chain.commit(number)) is not None]
    chain.close()
    counted = [item.contribution for commit in commits for item in taken(commit.body)]
    assert len(counted) > 2 * run.rounds.count
    assert not any(contribution.loss for contribution in counted)


@pytest.mark.thorough
def test_a_site_of_two_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = run_example(tmp_path, monkeypatch, "--boxes", "2", "--devices", "1", "--no-baseline")
    assert "every node has the same state hash after every round" in said["testnet"]
    _nothing_of_it_left(tmp_path)
