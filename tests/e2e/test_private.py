"""examples/private-finetune, command by command: three sites, their own data, one model that is better than each site's own."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.node.data.tokens import train_tokenizer
from dilocox.transport.blobs import BlobStore
from dilocox.transport.corpora import corpus_in, last_built
from tests.corpora import words
from tests.e2e.conftest import PATIENCE_SECONDS
from tests.e2e.test_your_model import make_hub, make_smaller

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).parents[2] / "examples" / "private-finetune" / "README.md"
SITES = {"SITE-A": "ABCDEFGH", "SITE-B": "IJKLMNOP", "SITE-C": "QRSTUVWX"}
"""Each writes of other things than the others, which the text that all share has of all."""


SMALLER = {r"^count = .*$": "count = 8", r"^synchronous_rounds = .*$": "synchronous_rounds = 2"}


def write(folder: Path, letters: str, number: int) -> None:
    """A text in a language of these letters."""
    alike = words(3, 60, number)
    spelt = [re.sub(r"[a-z]", lambda found: letters[ord(found[0]) % len(letters)], text) for text in alike]
    (folder / f"{letters}-{number}.txt").write_text("\n".join(spelt))


def test_the_example_s_commands_make_a_model_that_beats_each_site_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
            [sys.executable, "-P", "-m", "dilocox.cli.main", *shlex.split(command)[1:]],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, (command, done.stdout)
        said[verb] = said.get(verb, "") + done.stdout
        if verb == "init":
            make_smaller(tmp_path / "clinics.toml", SMALLER)
    [common] = re.findall(r"committed model after \d+ inner steps: ([0-9.]+)", said["testnet"])
    alone = re.findall(r"DATA-[ABC] alone after \d+ inner steps: ([0-9.]+)", said["testnet"])
    assert len(alone) == 3
    assert float(common) < min(map(float, alone)), said["testnet"]
    assert "every node has the same state hash after every round" in said["testnet"]
    _nothing_of_it_left(tmp_path)


def _nothing_of_it_left(folder: Path) -> None:
    """No shard of a site lies in anybody's folder."""
    for site in ("DATA-A", "DATA-B", "DATA-C"):
        corpus = corpus_in(BlobStore(folder / site, ours=False), last_built(folder / site))
        assert corpus is not None
        names = {shard.digest for shard in (*corpus.training, *corpus.held_out)}
        assert not [path for path in (folder / "home/testnet").rglob("*") if path.name in names]
