"""Tests of `dilocox check`: invalid run files, unusual runs, and machines that do not fit."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilocox.cli.exit_codes import Exit
from dilocox.cli.main import app
from dilocox.cli.run import check
from dilocox.cli.run.init import render_preset
from dilocox.node.daemon import warn_of_room
from dilocox.node.data.privacy_budget import Budget, open_account, steps_left
from dilocox.node.planning.disk_model import written
from dilocox.node.preflight import machine as checks
from dilocox.node.preflight.machine import Here, Role
from dilocox.node.preflight.network import Seen
from dilocox.node.workers import devices as machine
from dilocox.node.workers.environment import CHECKPOINT_SECONDS
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Finding, Level, of_run
from dilocox.transport.store.corpus_store import last_built
from dilocox.transport.store.data_directory import load_identity, run_folder
from tests.corpora import corpus_of, words
from tests.helpers import COORDINATOR, identity, manifest
from tests.unit.test_private import private_run

WRONG = [
    ("model.config", "vocab_size", "0"),
    ("model.config", "vocab_size", "256.5"),
    ("model.config", "vocab_size", "true"),
    ("model.config", "vocab_size", "100"),
    ("model.config", "vocab_size", "255"),
    ("model.config", "hidden_size", "126"),
    ("model.config", "hidden_size", "-128"),
    ("model.config", "hidden_size", '"128"'),
    ("model.config", "intermediate_size", "0"),
    ("model.config", "num_hidden_layers", "0"),
    ("model.config", "num_hidden_layers", "100000"),
    ("model.config", "num_attention_heads", "3"),
    ("model.config", "num_key_value_heads", "3"),
    ("model.config", "head_dim", "33"),
    ("model", "sequence_length", "0"),
    ("model.config", "max_position_embeddings", "16"),
    ("model.config", "sliding_window", "64"),
    ("model", "stages", "9"),
    ("model", "stages", "0"),
    ("model.config", "model_type", '"gpt"'),
    ("model.config", "rope_parameters", "{ rope_theta = 0 }"),
    ("model", "initial", '"abc"'),
    ("model", "seeed", "1"),
    ("data", "digest", '"00"'),
    ("data", "name", '"../secrets"'),
    ("data", "path", '"/etc"'),
    ("data", "evaluation_sequences", "0"),
    ("training", "optimizer", '"sgd"'),
    ("training", "learning_rate", "0"),
    ("training", "learning_rate", "nan"),
    ("training", "learning_rate", '"6e-3"'),
    ("training", "muon_momentum", "1.0"),
    ("training", "weight_decay", "2"),
    ("training", "total_steps", "0"),
    ("training", "batch_size", "0"),
    ("training", "batch_size", "false"),
    ("training", "microbatches", "3"),
    ("training", "schedule", '"interleaved"'),
    ("training", "precision", '"fp8"'),
    ("outer", "momentum", "1.0"),
    ("outer", "learning_rate", "-1"),
    ("compression", "codec", '"gzip"'),
    ("compression", "k", "0"),
    ("compression", "k", "5000"),
    ("compression", "adapt", '"effective-rank"'),
    ("compression", "entropy_coding", "1"),
    ("rounds", "count", "true"),
    ("rounds", "count", "0"),
    ("rounds", "inner_steps", "50"),
    ("rounds", "max_inner_steps", "5"),
    ("rounds", "round_seconds", "400"),
    ("rounds", "lead_weight", "1.5"),
    ("rounds", "min_clusters", "4"),
    ("rounds", "deadline_seconds", '"5m"'),
    ("rounds", "overlap", "true"),
    ("scoring", "voters", "1000"),
    ("standing", "rounds", "-1"),
    ("admission", "policy", '"closed"'),
    ("admission", "allow", '["bob"]'),
    ("admission", "policy", '"allow-list"'),
    ("attestation", "kinds", '["tdx"]'),
    ("run", "owner", '"me"'),
    ("run", "coordinator", '"me"'),
    ("run", "name", '"a b"'),
]
"""A value of a key of a run file that is right in all else."""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid run file with its key and data."""
    folder = tmp_path_factory.mktemp("check")
    made = CliRunner().invoke(app, ["init", str(folder / "run.toml")], env={"DILOCOX_HOME": str(folder / "home")})
    assert made.exit_code == 0, made.output
    return folder / "run.toml"


def checked(run: Path | str, home: Path, *options: str) -> tuple[int, list[dict[str, str]]]:
    """Return (exit code, findings)."""
    told = CliRunner().invoke(app, ["check", str(run), "--json", *options], env={"DILOCOX_HOME": str(home)})
    return told.exit_code, json.loads(told.stdout)["findings"]


def test_check_of_a_model_changed_after_init_says_its_new_initial_state(right: Path, tmp_path: Path):
    text = right.read_text()
    assert "hidden_size = 128" in text
    changed = tmp_path / "run.toml"
    changed.write_text(text.replace("hidden_size = 128", "hidden_size = 64"))
    shutil.copy(right.with_suffix(".key"), changed.with_suffix(".key"))
    _, found = checked(changed, right.parent / "home")
    [wrong] = [each for each in found if each["about"] == "model.seed_state"]
    assert wrong["level"] == Level.WRONG.value
    [value] = re.findall(r'seed_state = "([0-9a-f]{64})"', wrong["do"])
    serve = ["coordinator", str(changed), "--home", str(tmp_path / "served"), "--port", "0", "--api", "127.0.0.1:0"]
    served = subprocess.run([sys.executable, "-P", "-m", "dilocox.cli", *serve], capture_output=True, text=True)
    assert served.returncode == Exit.USAGE
    assert not served.stdout, "no link is printed"
    assert value in served.stderr
    assert "Traceback" not in served.stderr
    changed.write_text(re.sub(r'seed_state = "[0-9a-f]{64}"', f'seed_state = "{value}"', changed.read_text()))
    _, found = checked(changed, right.parent / "home")
    assert [each["level"] for each in found if each["about"] == "model.seed_state"] == [Level.FINE.value]


def spoiled(text: str, section: str, key: str, value: str) -> tuple[str, int]:
    """Return (the run file with this value, its line)."""
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(f"{key} =") or section not in ("model", "model.config", "training")
    ]
    at = next((number for number, line in enumerate(lines) if line.startswith(f"[{section}]")), len(lines))
    after = next((number for number in range(at + 1, len(lines)) if lines[number].startswith("[")), len(lines))
    kept = [line for line in lines[at + 1 : after] if line.split("=")[0].strip() != key]
    lines[at:after] = [f"[{section}]", f"{key} = {value}", *kept]
    return "\n".join(lines), at + 2


@pytest.mark.parametrize(("section", "key", "value"), WRONG)
def test_a_wrong_run_file_does_not_pass(right: Path, tmp_path: Path, section: str, key: str, value: str):
    text, line = spoiled(right.read_text(), section, key, value)
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "run.key").write_bytes(right.with_suffix(".key").read_bytes())
    (tmp_path / "run.key").chmod(0o600)
    code, found = checked(tmp_path / "run.toml", right.parent / "home")
    wrong = [finding for finding in found if finding["level"] == "wrong"]
    assert code == 5, found
    assert wrong
    assert all(finding["says"] for finding in wrong)
    if f"{section}.{key}" in {finding["about"] for finding in wrong}:
        assert any(f"(line {line})" in finding["says"] for finding in wrong) or section in ("admission", "attestation")


def test_all_faults_are_told_at_once_with_examples(right: Path, tmp_path: Path):
    text = right.read_text().replace("count = 20", "count = true").replace("batch_size = 8", 'batch_size = "8"')
    (tmp_path / "run.toml").write_text(text)
    code, found = checked(tmp_path / "run.toml", right.parent / "home")
    assert code == 5
    wrong = {finding["about"]: finding for finding in found if finding["level"] == "wrong"}
    assert wrong.keys() == {"training.batch_size", "rounds.count"}
    assert wrong["training.batch_size"]["do"].startswith("such as batch_size = ")
    number = text.splitlines().index("count = true") + 1
    assert f"(line {number})" in wrong["rounds.count"]["says"]


def test_a_right_run_file_passes_and_says_what_is_next(right: Path):
    home = {"DILOCOX_HOME": str(right.parent / "home")}
    advised = CliRunner().invoke(app, ["check", str(right), "--host", "h.example"], env=home).output
    assert f"dilocox coordinator {right} --host h.example\n" in advised
    advised = CliRunner().invoke(app, ["check", str(right), "--port", "0", "--home", str(right.parent / "other")]).output
    assert f"dilocox coordinator {right}\n" in advised, "it has a folder and a port of its own"
    told = CliRunner().invoke(app, ["check", str(right)], env=home)
    assert told.exit_code == 0, told.output
    assert f"no errors; serve it with: dilocox coordinator {right}" in told.output.replace("\n", "")


def test_a_link_is_advised_as_a_shell_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def seen(link: JoinLink, here: Here) -> Seen:
        return Seen(())

    monkeypatch.setattr(check, "see_run", seen)
    link = str(JoinLink(bytes(32), COORDINATOR.peer, "127.0.0.1:1", bytes(32), ("/ip4/127.0.0.1/tcp/1",)))
    assert "&" in link
    said = ["--home", str(tmp_path), "--port", "0", "--data", f"some={tmp_path}", "--data", f"other={tmp_path}"]
    told = CliRunner().invoke(app, ["check", link, *said, "--json"]).output
    assert "join with" not in told
    told = CliRunner().invoke(app, ["check", link, *said]).output
    assert f"no errors; join with: dilocox node --join '{link}' {' '.join(said)}\n" in told
    told = CliRunner().invoke(app, ["check", link, "--home", str(tmp_path), "--cluster-interface", "lo"]).output
    assert "--cluster-interface lo --cluster-boxes N\n" in told
    told = CliRunner().invoke(app, ["check", link, "--as", "archive"], env={"DILOCOX_CHECK__HOST": "h.example"}).output
    assert f"dilocox archive --join '{link}' --host h.example --archive URL\n" in told


def test_data_of_ones_own_are_looked_at_with_a_run_file_too(right: Path, tmp_path: Path):
    code, found = checked(right, right.parent / "home", "--private", str(tmp_path))
    assert code == 5
    assert [finding["about"] for finding in found if finding["level"] == "wrong"] == ["--private"]


@pytest.mark.parametrize(("content", "says"), [(None, "no run file"), (b"\xff\xfe", "UTF-8")])
def test_what_is_no_run_file_is_said_so(tmp_path: Path, content: bytes | None, says: str):
    if content is not None:
        (tmp_path / "run.toml").write_bytes(content)
    told = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])
    assert told.exit_code == 2
    assert says in told.output
    assert "Traceback" not in told.output


def abouts(found: Iterable[Finding], level: Level) -> set[str]:
    return {finding.about for finding in found if finding.level is level}


ODD: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"training": {"total_steps": 5000}}, "training.total_steps"),
    ({"training": {"total_steps": 10}}, "training.total_steps"),
    ({"training": {"warmup_steps": 20, "total_steps": 20}}, "training.warmup_steps"),
    ({"training": {"learning_rate": 3.0}}, "training.learning_rate"),
    ({"training": {"optimizer": "muon", "muon_learning_rate": 2.0}}, "training.muon_learning_rate"),
    ({"outer": {"learning_rate": 7.0}}, "outer.learning_rate"),
    ({"compression": {"k": 9}}, "compression.k"),
    ({"compression": {"codec": "int4"}}, "compression.rank"),
    ({"compression": {"rank": 64}}, "compression.rank"),
    ({"rounds": {"vote_seconds": 4000.0}}, "rounds.vote_seconds"),
    ({"rounds": {"liveness_seconds": 3600.0}}, "rounds.liveness_seconds"),
    ({"rounds": {"max_inner_steps": 4}}, "rounds.max_inner_steps"),
    ({"rounds": {"synchronous_rounds": 5}}, "rounds.synchronous_rounds"),
    ({"rounds": {"overlap": "delayed", "lead_weight": 0.25}}, "rounds.lead_weight"),
    ({"rounds": {"snapshot_every": 9}}, "rounds.snapshot_every"),
    ({"rounds": {"evaluate_every": 9}}, "rounds.evaluate_every"),
    ({"rounds": {"min_clusters": 1}}, "rounds.min_clusters"),
]
SENSIBLE: dict[str, dict[str, Any]] = {"training": {"total_steps": 20}, "model": {"seed_state": "00" * 32}}


@pytest.mark.parametrize(("sections", "about"), ODD)
def test_what_hardly_anybody_means_is_said(sections: dict[str, dict[str, Any]], about: str):
    run = manifest(**{**SENSIBLE, **sections})
    assert of_run(manifest(**SENSIBLE)) == []
    assert about in abouts(of_run(run), Level.ODD)
    assert all(finding.says and finding.do for finding in of_run(run))
    assert of_run(Manifest.from_canonical(run.canonical_bytes())) == of_run(run), "as it arrives, every default is written out"


def test_presets_are_sensible():
    for preset in ("tiny", "llama-10m", "llama-125m", "llama-350m", "llama-1b", "llama-7b", "qwen1.5-107b"):
        text = render_preset(preset, preset, "00" * 32)
        assert abouts(of_run(Manifest.from_toml(text)), Level.ODD) == {"model.seed_state"}, "which `init` adds"
        bound = text.replace("[model]\n", f'[model]\nseed_state = "{"00" * 32}"\n')
        assert of_run(Manifest.from_toml(bound)) == [], preset


def test_a_run_that_can_never_begin_is_wrong():
    allowed = manifest(**SENSIBLE, admission={"policy": "allow-list", "allow": [identity(0).peer]})
    assert abouts(of_run(allowed), Level.WRONG) == {"admission.allow"}
    evidence = manifest(**SENSIBLE, attestation={"kinds": ["simulated"]})
    assert abouts(of_run(evidence), Level.WRONG) == {"attestation.measurements.simulated"}
    assert abouts(of_run(evidence), Level.ODD) == {"attestation.kinds"}


def test_it_says_what_the_data_take_of_a_disk(right: Path):
    _, found = checked(right, right.parent / "home")
    [data] = [each for each in found if each["about"].startswith("data ")]
    [said] = re.findall(r"are in .*: ([0-9.,]+) MB", data["says"])
    folder = right.parent / "home/data/stdlib"
    assert float(said.replace(",", "")) == pytest.approx(sum(path.stat().st_size for path in folder.rglob("*")) / 1e6, rel=0.02)


def test_a_coordinator_does_not_serve_a_run_that_cannot_begin(right: Path, tmp_path: Path):
    text, _ = spoiled(right.read_text(), "admission", "policy", '"allow-list"')
    (tmp_path / "run.toml").write_text(text)
    told = CliRunner().invoke(app, ["coordinator", str(tmp_path / "run.toml"), "--home", str(tmp_path / "home")])
    assert told.exit_code != 0
    assert "admission.allow: names 0 peers" in str(told.exception)
    assert not (tmp_path / "home").exists()


def here(home: Path, **changes: object) -> Here:
    return Here(**{"home": home, "host": "127.0.0.1", "port": 0, "devices": None, "data": {}, "interface": None, **changes})  # type: ignore[arg-type]


def test_a_machine_that_does_not_fit_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = manifest(**SENSIBLE)
    assert abouts(checks.of_machine(run, here(tmp_path)), Level.WRONG) == set()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = [*checks.of_machine(run, here(tmp_path, port=port, interface="nosuch0", data={"none": tmp_path}))]
    assert abouts(found, Level.WRONG) == {"port", "cluster interface", "--data none"}
    assert abouts(checks.of_machine(run, here(tmp_path, data={"other": tmp_path})), Level.ODD) == {"--data other"}
    large = Manifest.from_toml(render_preset("qwen1.5-107b", "paper", "00" * 32))
    assert abouts(checks.of_machine(large, here(tmp_path)), Level.WRONG) >= {"memory", "disk"}


def test_a_node_says_what_check_says_of_its_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    large = Manifest.from_toml(render_preset("qwen1.5-107b", "paper", "00" * 32))
    warn_of_room(large, tmp_path, 1)
    said = [f"{each.about}: {each.says}" for each in checks.of_room(large, tmp_path, 1) if each.level is not Level.FINE]
    assert [line.partition(":")[0] for line in said] == [line.partition(":")[0] for line in caplog.messages]
    assert {line.partition(":")[0] for line in said} >= {"memory", "disk"}


def test_what_each_round_writes_is_said(tmp_path: Path):
    large = Manifest.from_toml(render_preset("llama-7b", "x", "00" * 32))
    (wear,) = [each for each in checks.of_room(large, tmp_path, 1) if each.about == "wear"]
    each = written(large, large.rounds.start_clusters).in_a_round(1e9, CHECKPOINT_SECONDS)
    assert each > 20 * 6.7e9
    assert f"each round writes {each / 1e9:,.1f} GB" in wear.says


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a read-only disk, or another user's folder: the existing folder in which the home is to be made."""
    asked: list[tuple[Path, int]] = []

    def access(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", access)
    (found,) = [each for each in checks.of_room(manifest(**SENSIBLE), tmp_path / "none" / "home", None) if each.about == "disk"]
    assert (found.level, str(tmp_path) in found.says) == (Level.WRONG, True)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


# Other findings about a machine, and leaks of a node's private data


@pytest.mark.parametrize(
    ("devices", "cards", "says"),
    [
        (1, "", "1 stage worker on CPUs, of which 1 trains 2 stages"),
        (2, "", "2 stage workers on CPUs, of which 2 train 2 stages"),
        (1, "0", "1 CUDA device, of which 1 trains 2 stages"),
        (2, "0,1", "2 CUDA devices, of which 2 train 2 stages"),
    ],
)
def test_devices_are_told_as_many_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, cards: str, says: str
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
    found = checks.of_machine(manifest(), here(tmp_path, devices=devices))
    assert [finding.says.partition(":")[0] for finding in found if finding.about == "devices"] == [says]


def test_a_machine_that_keeps_is_judged_by_what_it_keeps(tmp_path: Path):
    """Check a relay, which trains nothing: no devices, no memory for them, no checkpoints."""
    large = Manifest.from_toml(render_preset("qwen1.5-107b", "paper", "00" * 32))
    for role in (Role.RELAY, Role.ARCHIVE):
        found = [*checks.of_machine(large, here(tmp_path, role=role))]
        assert {finding.about for finding in found} == {"disk", "port"}


def part(run: Manifest, at: Here) -> tuple[Level, str]:
    (finding,) = checks.of_part(run, at)
    return finding.level, finding.says


def test_who_keeps_is_named_by_the_run(tmp_path: Path):
    me = load_identity(tmp_path / "mine" / "identity.key").peer
    naming, open_to_all = manifest(run={"relays": [me]}), manifest()
    listing = manifest(admission={"policy": "allow-list", "allow": [identity(0).peer]})
    mine = {role: here(tmp_path / "mine", role=role) for role in Role}
    for role in (Role.RELAY, Role.ARCHIVE):
        assert part(naming, mine[role])[0] is Level.FINE
    level, says = part(open_to_all, mine[Role.RELAY])
    assert (level, says) == (Level.WRONG, checks.no_part(open_to_all, me, Role.RELAY))
    assert me in says
    assert part(open_to_all, mine[Role.ARCHIVE]) == (
        Level.FINE,
        "may read the run; it is not in run.relays, so no node stores payloads at it",
    )
    assert part(listing, mine[Role.ARCHIVE])[0] is Level.WRONG
    assert part(listing, mine[Role.NODE]) == (Level.WRONG, f"{me} is not on the run's allow-list")


def test_who_has_no_identity_yet_is_told_to_make_one(tmp_path: Path):
    """Check that a node without an identity does not report a temporary name as its identity."""
    new, listing = tmp_path / "new", manifest(admission={"policy": "allow-list", "allow": [identity(0).peer]})
    for run, role in ((listing, Role.NODE), (manifest(), Role.RELAY), (listing, Role.ARCHIVE)):
        level, says = part(run, here(new, role=role))
        assert (level, "has no identity yet" in says) == (Level.ODD, True)
    assert part(manifest(), here(new))[0] is Level.FINE
    assert not new.exists()


def test_a_run_file_is_checked_as_a_holder_too(right: Path, tmp_path: Path):
    code, found = checked(right, right.parent / "home", "--as", "relay", "--home", str(tmp_path / "new"))
    assert code == 0, found
    assert [finding["about"] for finding in found if finding["level"] == "odd"] == ["admission"]
    assert not {finding["about"] for finding in found} & {"devices", "memory", str(right.with_suffix(".key"))}
    told = CliRunner().invoke(app, ["check", str(right), "--as", "relay", "--home", str(tmp_path / "new")])
    assert f"once a coordinator serves it: dilocox relay --join LINK --home {tmp_path / 'new'}\n" in told.output
    told = CliRunner().invoke(app, ["check", str(right), "--as", "relay", "--devices", "2"])
    assert "--devices, --cluster-interface and --private are for a node" in str(told.exception)


def test_a_privacy_budget_is_checked_as_a_node_lays_it_out(tmp_path: Path):
    run, home = private_run(), tmp_path / "home"
    own = corpus_of(tmp_path / "own", words(40, 60)).folder

    def budget(epsilon: float, **changes: object) -> Finding:
        at = here(home, private=own, budget=Budget(epsilon, None, 1.0), **changes)
        (found,) = [finding for finding in checks.of_own_data(run, at) if finding.about == "--private-epsilon"]
        return found

    fits = budget(500.0)
    assert fits.level is Level.FINE
    assert f"for the {steps_left(run, 0):,} steps of rounds 1 to {run.rounds.count}" in fits.says
    assert budget(0.01).level is Level.WRONG
    assert not home.exists(), "a look changes no account"
    account = open_account(tmp_path, run, own, last_built(own), Budget(500.0, None, 1.0))
    account.lay_out(steps_left(run, 0), run.rounds.inner_steps)
    assert f"noise of {account.noise:.2f} times" in fits.says, "as the node does"
    (late,) = [
        finding
        for finding in checks.of_own_data(run, here(home, private=own, budget=Budget(500.0, None, 1.0)), run.rounds.count - 1)
        if finding.about == "--private-epsilon"
    ]
    assert f"for the {run.rounds.inner_steps:,} steps of rounds {run.rounds.count} to" in late.says, (
        "who joins late takes fewer"
    )
    (run_folder(home, run.run_id) / "stages" / "round-1").mkdir(parents=True)
    assert "trained in the run before" in budget(500.0).says


def test_a_corpus_that_was_promised_a_bound_is_said_before_a_node_refuses_it(tmp_path: Path):
    run, own = private_run(), corpus_of(tmp_path / "own", words(40, 60)).folder
    account = open_account(tmp_path, run, own, last_built(own), Budget(500.0, None, 1.0))
    account.lay_out(steps_left(run, 0), run.rounds.inner_steps)

    def found(gives_up: bool) -> list[str]:
        at = here(tmp_path, private=own, gives_up_bound=gives_up)
        return [finding.says for finding in checks.of_own_data(run, at) if finding.level is Level.WRONG]

    (why,) = found(False)
    assert "has a privacy bound" in why
    assert found(True) == []


def test_a_budget_said_to_check_is_refused_where_a_node_refuses_it(right: Path, tmp_path: Path):
    for options, why in (
        (["--private-delta", "1e-5"], "use --private-delta only with --private-epsilon"),
        (["--private-epsilon", "8"], "pass the corpus with --private DIR"),
        (["--private-epsilon", "8", "--private", str(tmp_path), "--devices", "2"], "pass --devices 1"),
    ):
        told = CliRunner().invoke(app, ["check", str(right), *options])
        assert why in str(told.exception)


def on(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Simulate a machine with this many GPUs."""
    monkeypatch.setattr(machine, "cuda_devices", lambda: gpus)
    monkeypatch.setattr(checks, "cuda_devices", lambda: gpus)


@pytest.mark.parametrize(
    ("days", "accepted", "level"), [(1, False, Level.WRONG), (1, True, Level.ODD), (100, False, Level.FINE)]
)
def test_a_disk_that_would_wear_out_is_an_error_to_be_confirmed(tmp_path: Path, days: int, accepted: bool, level: Level):
    """Reproduce a fault: 54 TB a day passed as `ok wear`."""
    large = Manifest.from_toml(render_preset("llama-7b", "x", "00" * 32))
    seconds = 135.0 * days
    each = written(large, large.rounds.start_clusters).in_a_round(seconds, CHECKPOINT_SECONDS)
    boxed = large.rounds.model_copy(update={"round_seconds": seconds})
    [wear] = [
        found
        for found in checks.of_room(large.model_copy(update={"rounds": boxed}), tmp_path, 1, accepted)
        if found.about == "wear"
    ]
    assert wear.level is level
    assert f"{each * 86_400 / seconds / 1e12:,.3g} TB a day" in wear.says
    assert ("--accept-wear" in wear.do) is (level is Level.WRONG)


@pytest.mark.parametrize(("gpus", "devices", "odd"), [(1, None, False), (8, None, True), (8, 2, False)])
def test_idle_gpus_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, devices: int | None, odd: bool):
    on(monkeypatch, gpus)
    monkeypatch.setattr(checks, "lacking_driver", lambda: None)
    run = manifest(training={"batch_size": 2, "microbatches": 2})
    found = [each for each in checks.of_room(run, tmp_path, devices) if each.about == "devices" and each.level is Level.ODD]
    assert bool(found) is odd, found


@pytest.mark.parametrize(
    ("version", "gpus", "stops"),
    [("cuda: Optional[str] = None", 2, True), ("cuda: Optional[str] = '12.8'", 2, False), ("cuda = None", 0, False)],
)
def test_a_torch_for_cpus_on_a_machine_with_gpus_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, gpus: int, stops: bool
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2'\n{version}\n")
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(machine, "find_spec", lambda name: spec)
    monkeypatch.setattr(machine, "PCI", tmp_path / "none")
    on(monkeypatch, gpus)
    lack = machine.lacking_driver()
    assert (lack is not None and lack.stops) is stops


def test_a_gpu_without_its_driver_is_odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on(monkeypatch, 0)
    monkeypatch.setattr(machine, "PCI", tmp_path)
    assert machine.lacking_driver() is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "vendor").write_text("0x10de\n")
    (tmp_path / "0000:01:00.0" / "class").write_text("0x030000\n")
    lack = machine.lacking_driver()
    assert lack is not None
    assert not lack.stops
