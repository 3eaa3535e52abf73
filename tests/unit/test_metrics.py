"""Tests of Prometheus metrics: right numbers, no label that grows with the swarm, and boards and alerts with existing
names only."""

import json
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dilocox.cli.look.status import round_row
from dilocox.cli.main import app
from dilocox.node.api import metrics
from dilocox.node.api.metrics import NodeMetrics
from dilocox.protocol import events
from dilocox.protocol.member.node_status import Status
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views import metrics as views_metrics
from dilocox.views.metrics import Healthy, RunMetrics
from tests.helpers import Table, identity, manifest

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_EVERY_DAEMON: dict[str, set[str]] = {
    "dilocox_build_info": {"version", "role"},
    "dilocox_round_current": set(),
    "dilocox_round_open_seconds": set(),
    "dilocox_rounds_total": {"outcome"},
    "dilocox_contributions_total": {"verdict", "reason"},
    "dilocox_round_phase_seconds_sum": {"phase"},
    "dilocox_network_bytes_total": {"direction", "kind"},
    "dilocox_peers": {"state"},
    "dilocox_held_out_loss": set(),
    "dilocox_disk_free_bytes": set(),
    "dilocox_events_total": {"kind"},
    "dilocox_well": set(),
}
OF_NODES: dict[str, set[str]] = {
    "dilocox_train_loss": set(),
    "dilocox_step_seconds": set(),
    "dilocox_tokens_total": set(),
    "dilocox_counted": set(),
    "dilocox_rounds_missed": set(),
    "dilocox_state_digest_agreed": set(),
}
"""Metrics of boards and alerts of operators, with the labels of each: a changed name breaks them silently."""


@pytest.fixture
async def told(tmp_path: Path):
    """Run four rounds, the last two without peer 2, with all metrics of a node; the first two rounds were reported
    earlier."""
    table = Table(manifest(rounds={"count": 9})).genesis().train(2, seconds=2.0)
    chain, log = ChainFile(tmp_path / "chain.db", table.run, views.describe), EventLog(tmp_path / "events.db")
    for commit in table.commits:
        chain.append(commit.envelope)
    me = identity(2).peer
    traffic = Traffic(download=Rates(usual_bytes_per_second=1e6))
    traffic.bytes.update({("sent", "blob"): 7, ("sent", "coordination"): 1, ("received", "archive"): 9})
    run = RunMetrics("node", chain, log, lambda: {"roster": 3}, traffic, me)
    table.absent(2)
    for _ in range(2):
        table.train(1, [0, 1])
    for commit in table.commits[chain.length :]:
        chain.append(commit.envelope)
    log.add(events.Diverged(3, ""))
    run.refresh()
    registry = CollectorRegistry()
    registry.register(run)
    progress = SimpleNamespace(loss=2.0, step_seconds=0.1, tokens=5, total_steps=6, round=4, roots={2: chain.state_before(2)})
    machine = SimpleNamespace(cluster=me, status=Status("training", "on the roster"))
    node = SimpleNamespace(progress=progress, chain=chain, manifest=table.run, machine=machine)
    registry.register(NodeMetrics(node, SimpleNamespace(reachable=True), lambda: True))  # type: ignore[arg-type]
    well = Healthy()
    well.well = False
    registry.register(well)
    yield registry
    log.close()
    chain.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


async def test_numbers(told: CollectorRegistry):
    assert value(told, "dilocox_round_current") == 5
    assert value(told, "dilocox_rounds_total", outcome="short") == 2, "only those since the start"
    assert value(told, "dilocox_rounds_total", outcome="complete") == 0
    assert value(told, "dilocox_contributions_total", verdict="counted", reason="") == 4
    assert value(told, "dilocox_contributions_total", verdict="excluded", reason="absent") == 2
    assert (value(told, "dilocox_counted"), value(told, "dilocox_rounds_missed")) == (0, 2)
    assert value(told, "dilocox_events_total", kind="diverged") == 1
    assert value(told, "dilocox_events_total", kind="left-out") == 0, "or an increase from nothing would not be seen"
    sent = [value(told, "dilocox_network_bytes_total", direction="sent", kind=kind) for kind in ("blob", "coordination")]
    assert sent == [7, 1]
    assert value(told, "dilocox_network_bytes_total", direction="received", kind="archive") == 9
    assert value(told, "dilocox_network_limit_bytes_per_second", direction="received") == 1e6
    assert value(told, "dilocox_network_limit_bytes_per_second", direction="sent") is None
    assert value(told, "dilocox_state_digest_agreed") == 1
    assert value(told, "dilocox_round_loss") == 2.0
    assert (value(told, "dilocox_disk_free_bytes") or 0) > 0


async def test_metrics_tell_what_the_rows_tell_that_page_top_and_rounds_show(tmp_path: Path):
    table = Table(manifest(rounds={"count": 9})).genesis()
    chain, log = ChainFile(tmp_path / "chain.db", table.run, views.describe), EventLog(tmp_path / "events.db")
    run, registry = RunMetrics("node", chain, log, dict, Traffic()), CollectorRegistry()
    registry.register(run)
    table.train(2, seconds=2.0)
    table.absent(2)
    table.train(2, [0, 1], seconds=3.0)
    for commit in table.commits:
        chain.append(commit.envelope)
    run.refresh()
    rows = json.loads(chain.rows())
    assert [row["counted"] for row in rows] == [0, 3, 3, 2, 2]
    outcomes = {name: value(registry, "dilocox_rounds_total", outcome=name) for name in ("complete", "short", "roster-only")}
    assert outcomes == {"complete": 2, "short": 2, "roster-only": 1}
    counted = value(registry, "dilocox_contributions_total", verdict="counted", reason="")
    missed = value(registry, "dilocox_contributions_total", verdict="excluded", reason="absent")
    assert (counted, missed) == (sum(row["counted"] for row in rows), sum(row["roster"] - row["counted"] for row in rows))
    seconds = value(registry, "dilocox_round_phase_seconds_sum", phase="whole")
    assert seconds == pytest.approx(sum(row["seconds"] for row in rows))
    assert value(registry, "dilocox_round_loss") == rows[-1]["loss"]
    assert value(registry, "dilocox_round_current") == rows[-1]["round"] + 1
    shown = [round_row(row) for row in rows]
    assert [cells[2] for cells in shown] == ["0/0", "3/3", "3/3", "2/3", "2/3"]
    assert [float(cells[4]) for cells in shown[1:]] == [pytest.approx(row["seconds"], abs=0.05) for row in rows[1:]]
    log.close()
    chain.close()


async def test_names_and_labels_are_those_that_are_promised(told: CollectorRegistry):
    found = {sample.name: set(sample.labels) for family in told.collect() for sample in family.samples}
    lacking = {name: labels for name, labels in {**OF_EVERY_DAEMON, **OF_NODES}.items() if found.get(name) != labels}
    assert lacking.keys() == {"dilocox_held_out_loss"}, "nobody measured one here; tests/e2e/test_operator.py has one"


async def test_no_label_grows_with_the_swarm(told: CollectorRegistry):
    text = generate_latest(told).decode()
    assert "12D3" not in text
    families = list(text_string_to_metric_families(text))
    assert all(family.name.startswith("dilocox_") and family.documentation for family in families)


def names(text: str) -> set[str]:
    return set(re.findall(r"dilocox_[a-z_]+", text))


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
async def test_boards_and_alerts_name_what_is_told(told: CollectorRegistry, file: str):
    samples = {sample.name for family in told.collect() for sample in family.samples}
    sometimes = {"dilocox_peers_attested", "dilocox_held_out_loss"}  # if the run requires evidence, or measures losses
    assert all(
        f'"{name}"' in (Path(metrics.__file__).read_text() + Path(views_metrics.__file__).read_text()) for name in sometimes
    )
    text = (DEPLOY / file).read_text()
    assert names(text) <= samples | sometimes
    assert names(text) >= {"dilocox_rounds_missed", "dilocox_disk_free_bytes", "dilocox_events_total"}
    assert yaml.safe_load(text)


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    return {"series": metric + named({"instance": "a", **labels}), "values": values}


def named(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def fires(alert: str, severity: str, at: str = "3m", **labels: str) -> dict:
    """Return an alert that fires at that time, with these labels and no others."""
    expected = {"alertname": alert, "alertstate": "firing", "severity": severity, "instance": "a", **labels}
    return {
        "expr": f'ALERTS{{alertname="{alert}"}}',
        "eval_time": at,
        "exp_samples": [{"labels": f"ALERTS{named(expected)}", "value": 1}],
    }


def test_prometheus_takes_the_alerts(tmp_path: Path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's prometheus) is not here")
    rules = DEPLOY / "alerts.yml"
    subprocess.run([promtool, "check", "rules", rules], check=True, capture_output=True)
    whole = "dilocox_round_phase_seconds"
    given = [
        series("dilocox_rounds_missed", "0 1 2 2"),
        series("dilocox_rounds_missed", "0 1 1 1", instance="b"),
        series("dilocox_rounds_missed", "0 5 6 7", instance="c"),
        series("dilocox_node_state", "1 1 1 1", state="paused", instance="c"),
        series("dilocox_events_total", "0 0 1 1", kind="diverged"),
        series("dilocox_events_total", "0 0 0 2", kind="nobody-counted"),
        series("dilocox_events_total", "4 4 4 4", kind="nobody-counted", instance="b"),
        series("dilocox_run_finished", "0 0 1 1"),
        series("dilocox_well", "1 0x20"),
        series("dilocox_well", "0x10 1x10", instance="b"),
        series("dilocox_round_open_seconds", "0 60 5000 5000"),
        series(f"{whole}_sum", "0 100 200 300", phase="whole"),
        series(f"{whole}_count", "0 1 2 3", phase="whole"),
        series("dilocox_round_open_seconds", "0 60 700 700", instance="b"),
        series(f"{whole}_sum", "0 100 200 300", phase="whole", instance="b"),
        series(f"{whole}_count", "0 1 2 3", phase="whole", instance="b"),
    ]
    expected = [
        fires("DilocoxNotCounted", "warning"),
        fires("DilocoxDiverged", "critical", kind="diverged"),
        fires("DilocoxNobodyCounted", "warning", kind="nobody-counted"),
        fires("DilocoxRunFinished", "info"),
        fires("DilocoxRoundStuck", "warning"),
        fires("DilocoxNotWell", "warning", at="17m"),
    ]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expected}
    (tmp_path / "test.yml").write_text(yaml.dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    ran = subprocess.run([promtool, "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_unit_starts_what_exists():
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "dilocox-node.service")
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert program.endswith("/dilocox")
    assert "DILOCOX_NODE__JOIN" in (DEPLOY / "dilocox-node.service").read_text()
    assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
