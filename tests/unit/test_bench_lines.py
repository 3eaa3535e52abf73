"""Tests that benches wait for swarms with progress, however long that takes, and for no others."""

from itertools import count

import pytest

from bench import lines


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(lines, "POLL_SECONDS", 0.0)


def test_a_swarm_that_moves_is_waited_for():
    looks, moves = count(), count()
    assert lines.until(lambda: next(looks) > 5, lambda: next(moves)) is True


def test_a_swarm_that_stands_still_is_not():
    with pytest.raises(SystemExit, match="stood still"):
        lines.until(lambda: None, lambda: 7)
    with pytest.raises(SystemExit, match="stood still"):
        lines.until(lambda: None)
