"""`dilocox top` shows what `status`, `rounds` and `peers` show."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dilocox.cli import top
from dilocox.cli.main import app
from dilocox.cli.show import round_row
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.rates import parse_rates
from dilocox.transport.traffic import Traffic
from dilocox.views import rows as views
from tests.helpers import COORDINATOR, Table, identity, manifest


def test_one_frame(monkeypatch: pytest.MonkeyPatch):
    table = Table(manifest()).genesis().train(3, seconds=2.0)
    status = {
        "role": "coordinator",
        "run": views.run(table.run),
        "peer": COORDINATOR.peer,
        "finished": False,
        "phase": "collecting",
        "why": "waiting for [bold]somebody",
        "round": 4,
        "contributions": 1,
        "receipts": 0,
        "roster": [identity(n).peer for n in range(3)],
        "absent": [],
        "refused": [],
        "network": views.network(Traffic(upload=parse_rates(["8mbit@00-24"], "--upload"))),
        "seconds_left": 93784.0,
        "health": {"well": False, "why": "Enough heard? no", "do": ""},
    }
    rounds = [views.round_row(commit.body) for commit in table.commits]
    peers = views.peers(table.run, table.head, services.PresenceList(), {}, COORDINATOR.peer)
    peers[0]["name"] = "[red]attic"
    out = io.StringIO()
    screen = Console(file=out, width=80, markup=False)
    monkeypatch.setattr(top, "console", screen)
    screen.print(top.frame(status, rounds, peers))
    shown = out.getvalue()
    assert "collecting: waiting for [bold]somebody" in shown
    assert "[red]attic" in shown
    assert "well     no: Enough heard? no" in shown
    assert "about 1 d 2 h to round 5" in shown
    assert "sent 0 B (at most 8 Mbit/s), received 0 B" in shown
    assert all(cell in shown for row in rounds for cell in round_row(row))
    assert "loss     ▁▁▁ 2.000" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_bars():
    assert top.sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert top.sparkline([1.0, 1.0]) == "▁▁"


def test_without_a_daemon(tmp_path: Path):
    assert CliRunner().invoke(app, ["top", "--home", str(tmp_path)]).exit_code == 3
