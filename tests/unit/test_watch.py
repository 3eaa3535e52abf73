"""Tests of `dilocox status --watch`, which shows the output of `status`, `rounds` and `peers`."""

import io
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from dilocox.cli import common
from dilocox.cli.exit_codes import Exit
from dilocox.cli.look import watch
from dilocox.cli.look.status import round_row, status_rows
from dilocox.cli.main import app
from dilocox.protocol.ids import short
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.limits.rate_limits import parse_rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.views import json_views as views
from tests.helpers import COORDINATOR, Table, identity, manifest


def test_one_frame(monkeypatch: pytest.MonkeyPatch):
    table = Table(manifest()).genesis().train(3, seconds=2.0)
    status = {
        "role": "coordinator",
        "run": views.run(table.run),
        "peer": COORDINATOR.peer,
        "name": "hall",
        "finished": False,
        "phase": "collecting",
        "why": "waiting for [bold]somebody",
        "round": 4,
        "contributions": 1,
        "receipts": 0,
        "roster": [identity(n).peer for n in range(3)],
        "absent": [],
        "coordinators": [{"leads": True, "name": "hall", "address": "192.0.2.1:7400"}],
        "refused": [],
        "network": views.network(Traffic(upload=parse_rates(["8mbit@00-24"], "--upload"))),
        "seconds_left": 93784.0,
        "health": {"well": False, "why": "Enough live? no", "do": ""},
    }
    rounds = [views.round_row(commit.body) for commit in table.commits]
    peers = views.peers(table.run, table.head, services.PresenceList(), {}, COORDINATOR.peer)
    peers[0]["name"] = "[red]attic"
    out = io.StringIO()
    screen = Console(file=out, width=80, markup=False)
    monkeypatch.setattr(watch, "console", screen)
    screen.print(watch.frame(status, rounds, peers))
    shown = out.getvalue()
    assert f'coordinator {short(COORDINATOR.peer)} "hall"' in shown
    assert "collecting: waiting for [bold]somebody" in shown
    assert "[red]attic" in shown
    assert 'leads    "hall" at 192.0.2.1:7400' in shown
    assert "healthy  no: Enough live? no" in shown
    assert "about 1 d 2 h to round 5" in shown
    assert "sent 0 B (at most 8 Mbit/s), received 0 B" in shown
    assert all(cell in shown for row in rounds for cell in round_row(row))
    assert "loss     ▁▁▁ 2.000" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_screen_of_a_node():
    """Check its round, its connection, its contributions, their cost, and the advice."""
    me, run = identity(0).peer, views.run(manifest(rounds={"count": 400}))
    traffic = Traffic()
    traffic.bytes[("sent", "blob")] = 9_000_000
    status = {
        "role": "node",
        "run": run,
        "peer": me,
        "name": "attic",
        "cluster": me,
        "boxes": [{"peer": me, "stages": [0, 1]}],
        "state": "training",
        "why": "on the roster",
        "advice": "",
        "finished": False,
        "phase_round": 41,
        "inner_step": 37,
        "inner_steps": 100,
        "phase_seconds_left": 41.0,
        "phase_steps": {"40": 100},
        "nobody_counted": False,
        "round": 41,
        "round_why": "waiting for the contributions of 12D3…k7Qm",
        "coordinator_connected": True,
        "seconds_left": 7260.0,
        "hours": None,
        "privacy": None,
        "address": "203.0.113.7:7400",
        "reach": "reachable",
        "clock_offset": 0.012,
        "counted": [True, True, False],
        "tokens_per_second": 8100.0,
        "loss": 3.12,
        "allreduce_bytes": 4_153_300_000,
        "network": {**views.network(traffic), "last_round": {"round": 40, "sent": 4_100_000, "received": 1}},
        "codec_native": True,
        "downloading": {"held": 1, "size": 4},
        "attestation": None,
        "excluded": [{"reason": "late", "detail": "4 s after the ballot", "do": "lower training.inner_steps"}],
        "nobody_keeps": False,
        "health": {"well": False, "why": "Counted? in 2 of the last 3 rounds that counted a cluster", "do": ""},
    }
    lines = status_rows(status)
    shown = "\n".join(f"{label} {text}" for label, text in lines)
    for said in (
        f'run test ({run["run_id"][:8]}…)   node {short(me)} "attic"',
        "state training: on the roster   round 41/400, inner step 37/100, 41 s left",
        "round 41 is open: waiting for the contributions of 12D3…k7Qm",
        "left about 2 h 1 min to round 400",
        "network 203.0.113.7:7400   reachable   clock +12 ms",
        "counted 2 of the last 3 rounds",
        "speed 8,100 tok/s   loss 3.120   sent 4,100,000 B in round 40, 1,013x less than AllReduce",
        "traffic sent 9,000,000 B, received 0 B",
        "fetching 1 of 4 B (25%)",
        "warning not counted: late: 4 s after the ballot",
        "help lower training.inner_steps",
        "healthy no: Counted? in 2 of the last 3 rounds that counted a cluster",
    ):
        assert said in shown, said
    assert [label for label, _ in lines][:2] == ["run", "state"]
    idle = dict(status_rows({**status, "allreduce_bytes": 0}))["speed"]
    assert "AllReduce" not in idle, "what it sent was no work of that round"
    paused = dict(status_rows({**status, "state": "paused", "phase_seconds_left": 0.0}))["state"]
    assert "inner step" not in paused


@pytest.mark.parametrize(("terminal", "environment"), [(False, {}), (True, {"NO_COLOR": "1"})])
def test_off_a_terminal_or_with_no_color_nothing_is_coloured(
    terminal: bool, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    out = io.StringIO()
    monkeypatch.setattr(common, "errors", Console(file=out, force_terminal=terminal, markup=False, _environ=environment))
    with pytest.raises(typer.Exit):
        common.fail("no such round", Exit.USAGE, "try another")
    assert not re.search(r"\x1b\[(\d+;)*3\dm", out.getvalue())
    assert "no such round" in out.getvalue()


def test_bars():
    assert watch.sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert watch.sparkline([1.0, 1.0]) == "▁▁"


def test_without_a_daemon(tmp_path: Path):
    assert CliRunner().invoke(app, ["status", "--watch", "--home", str(tmp_path)]).exit_code == 3
