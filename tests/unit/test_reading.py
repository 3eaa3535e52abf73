"""Tests of a reader's view of a run without taking part in it."""

from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilocox.cli.look.status import spell, verdict
from dilocox.cli.main import app
from dilocox.node.run_reader import RunReader
from dilocox.node.state.run_data import open_run_data
from dilocox.protocol.errors import ConfigError, LocalError
from tests.helpers import Table, manifest
from tests.peers import meeting

RUN = manifest(rounds={"count": 100, "snapshot_every": 1})


def test_the_version_is_told():
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"dilocox {metadata.version('dilocox')}\n")


def test_a_shell_completes_verbs_and_options():
    for words, wanted in (("dilocox pau", "pause"), ("dilocox node --hou", "--hours"), ("dilocox config s", "show")):
        environment = {"_DILOCOX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        told = CliRunner().invoke(app, [], env=environment, prog_name="dilocox")
        assert wanted in told.stdout.split(), told.output


@pytest.mark.parametrize(("well", "code"), [(True, 0), (None, 4), (False, 6)])
def test_a_status_that_is_not_fine_has_an_exit_code(well: bool | None, code: int):
    assert verdict({"health": {"well": well}}) == code


def test_durations_are_spelt():
    assert [spell(seconds) for seconds in (0.4, 59, 61, 3599, 7260, 93784)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 1 min",
        "1 d 2 h",
    ]


async def test_a_state_that_nobody_serves_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilocox.node.run_reader.RETRY_SECONDS", 0.0)
    async with meeting(tmp_path, RUN, *[list(Table(RUN).genesis().train(3).commits)] * 2) as (one, _):
        reader = RunReader(RUN, one.chain, open_run_data(one.chain, one.exchange.downloader))
        with pytest.raises(LocalError, match="serves a state"):
            await reader.state()
        with pytest.raises(ConfigError, match="has not agreed on the state before round 90; its chain has 4 commits"):
            await reader.state(90)
        with pytest.raises(LocalError, match="cannot replay round 2"):
            await reader.replayable(2)
