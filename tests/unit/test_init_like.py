"""`dilocox init --like`: a run file whose stages, codec, H and deadlines are those of the named machines."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.cli.run.init_like import fitted, with_settings
from dilocox.node.planning.fitting import fit
from dilocox.node.planning.plan import Setting
from dilocox.node.planning.step_model import KINDS
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.limits.rate_limits import bits_per_second


def text_of(preset: str, clusters: int = 2) -> str:
    return render_preset(preset, preset, "00" * 32, machines=clusters)


@pytest.mark.parametrize(
    ("preset", "like", "stages"),
    [
        ("llama-125m", "8xh100 @1gbit", 1),
        ("llama-1b", "8xh100@1gbit", 1),
        ("llama-1b", "2x8xh100 @10gbit", 4),
        ("llama-7b", "8xh100 @1gbit", 4),
    ],
)
def test_fitted_run_has_as_many_stages_as_its_machines_need(preset: str, like: str, stages: int):
    text, sentences = fitted(text_of(preset), 2, like)
    run, before = Manifest.from_toml(text), Manifest.from_toml(text_of(preset))
    assert run.model.stages == stages
    assert run.training.microbatches == 0
    assert run.rounds.inner_steps * run.rounds.count == pytest.approx(before.training.total_steps, rel=0.05)
    assert run.rounds.deadline_seconds >= before.rounds.deadline_seconds
    assert sentences[0].startswith("placement: ")
    assert "the link hides the exchange" in sentences[-1]


@pytest.mark.parametrize("preset", sorted(set(preset_names()) - {"qwen1.5-107b"}))
def test_fitted_run_file_says_what_was_advised(preset: str):
    machines = Setting(3, 1, 8, "h200", "200mbit")
    result = fit(Manifest.from_toml(text_of(preset, 3)), machines, KINDS["h200"], bits_per_second("200mbit", "x"))
    run = Manifest.from_toml(fitted(text_of(preset, 3), 3, "8xh200 @200mbit")[0])
    for section, values in result.settings.items():
        assert values.items() <= getattr(run, section).model_dump().items()


def test_settings_replace_values_and_leave_comments_and_other_sections():
    text = "[model]   # of us\nstages = 2 # two\n\n[compression]\nrank = 3\n\n[rounds]\ncount = 4     # four\n"
    found = with_settings(
        text, {"model": {"stages": 1}, "compression": {"codec": "int2"}, "rounds": {"count": 5, "overlap": "none"}}
    )
    assert found == (
        '[model]   # of us\nstages = 1 # two\n\n[compression]\ncodec = "int2"\n\n[rounds]\noverlap = "none"\ncount = 5     # four\n'
    )


@pytest.mark.parametrize("like", ["eight", "8xabacus @1gbit", "0xh100 @1gbit", "8xh100"])
def test_machines_that_cannot_be_read_are_refused(like: str):
    with pytest.raises(typer.Exit) as refused:
        fitted(text_of("tiny"), 2, like)
    assert refused.value.exit_code == 2


def test_machines_without_room_write_no_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    file = tmp_path / "run.toml"
    told = CliRunner().invoke(
        app, ["init", str(file), "--preset", "qwen1.5-107b", "--machines", "2", "--like", "4x4090 @1gbit"]
    )
    assert told.exit_code == 2, told.output
    assert "would hold" in told.output
    assert not file.exists()
    assert not file.with_suffix(".key").exists()
