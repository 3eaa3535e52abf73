"""Tests of a node's signed statements: they are on disk before they are sent, and no incarnation contradicts them."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.state.signed_statements import BLOCK, SignedStatementLog
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.store.chain_file import open_database
from tests.helpers import digest, identity
from tests.peers import PATIENCE_SECONDS

RUN_ID = digest("run")


def claim(serial: int) -> Statement:
    body = pb.Claim(serial=serial, round=2, head=digest("head"), state=digest("state"))
    return seal(identity(1), pb.KIND_CLAIM, RUN_ID, body)


def report() -> Statement:
    body = pb.StateReport(round=2, head=digest("head"), state=digest("state"))
    return seal(identity(1), pb.KIND_STATE_REPORT, RUN_ID, body)


def another_life(path: Path) -> SignedStatementLog:
    """Open it as after `kill -9`, when it closed nothing."""
    return SignedStatementLog(path, RUN_ID)


def test_a_restart_finds_the_newest_of_each_kind(tmp_path: Path):
    own = SignedStatementLog(tmp_path / "own.db", RUN_ID)
    for statement in (claim(1), report(), claim(2)):
        own.keep(statement)
    found = {statement.kind: statement.digest for statement in another_life(tmp_path / "own.db").all()}
    assert found == {pb.KIND_CLAIM: claim(2).digest, pb.KIND_STATE_REPORT: report().digest}


def test_statements_of_another_run_are_not_said_again(tmp_path: Path):
    SignedStatementLog(tmp_path / "own.db", RUN_ID).keep(claim(1))
    assert list(SignedStatementLog(tmp_path / "own.db", digest("another run")).all()) == []


@pytest.mark.parametrize("count", [1, BLOCK // 2, BLOCK // 2 + 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_the_sequence_never_goes_back(tmp_path: Path, count: int):
    said: list[int] = []
    for _ in range(3):
        own = another_life(tmp_path / "own.db")
        said += [own.next_sequence() for _ in range(count)]
    assert all(later > earlier for earlier, later in pairwise(said))


class Disk:
    """Calls before it does what is asked."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database, self.close = database, database.close
        self.before: Callable[[str], None] = lambda query: None

    def execute(self, query: str, *arguments: Any) -> sqlite3.Cursor:
        self.before(query)
        return self._database.execute(query, *arguments)


def on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SignedStatementLog, Disk]:
    disk = Disk(open_database(path))
    with monkeypatch.context() as patched:
        patched.setattr("dilocox.node.state.signed_statements.open_database", lambda path: disk)
        return SignedStatementLog(path, RUN_ID), disk


def test_a_heartbeat_waits_for_no_statement_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writing, said = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def before(query: str) -> None:
        if query.startswith("INSERT"):
            writing.set()
            in_time.append(said.wait(PATIENCE_SECONDS))

    own, disk = on_disk(tmp_path / "own.db", monkeypatch)
    disk.before = before
    keeping = threading.Thread(target=own.keep, args=(claim(1),))
    keeping.start()
    assert writing.wait(PATIENCE_SECONDS)
    for _ in range(BLOCK):
        own.next_sequence()
    said.set()
    keeping.join()
    assert in_time == [True]
    own.close()


def test_no_number_is_said_before_it_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check it; a statement waits for a reservation only if there is no other number."""
    all_said, one_more = threading.Event(), threading.Event()
    seen: list[tuple[bool, bool]] = []

    def before(query: str) -> None:
        seen.append((all_said.wait(PATIENCE_SECONDS), one_more.wait(0.2)))  # time enough, were it not to wait for us

    own, disk = on_disk(tmp_path / "own.db", monkeypatch)
    disk.before = before
    said = [own.next_sequence() for _ in range(BLOCK)]
    all_said.set()
    said.append(own.next_sequence())
    one_more.set()
    assert seen == [(True, False)]
    assert another_life(tmp_path / "own.db").next_sequence() > said[-1]
    own.close()


def test_a_disk_that_reserves_no_more_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def before(query: str) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    own, disk = on_disk(tmp_path / "own.db", monkeypatch)
    disk.before = before
    said: list[int] = []
    with pytest.raises(sqlite3.OperationalError, match="full"):
        said.extend(own.next_sequence() for _ in range(BLOCK + 1))
    assert another_life(tmp_path / "own.db").next_sequence() > said[-1]
    for _ in range(2 * BLOCK):
        with suppress(sqlite3.OperationalError):
            said.append(own.next_sequence())
    disk.before = lambda query: None
    said.append(own.next_sequence())
    assert all(later > earlier for earlier, later in pairwise(said)), "there is room again"
    assert another_life(tmp_path / "own.db").next_sequence() > said[-1]
    own.close()


@pytest.mark.parametrize("damage", ["garbage", "lost"])
def test_a_damaged_file_is_set_aside_and_the_sequence_goes_on(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "own.db"
    monkeypatch.setattr("dilocox.node.state.signed_statements.time.time", lambda: 1_700_000_000.0)
    own = SignedStatementLog(path, RUN_ID)
    own.keep(claim(1))
    last = max(own.next_sequence() for _ in range(BLOCK // 2))
    own.close()
    for leftover in tmp_path.glob("own.db-*"):
        leftover.unlink()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(b"garbage" * 100)
    monkeypatch.setattr("dilocox.node.state.signed_statements.time.time", lambda: 1_700_000_001.0)
    healed = SignedStatementLog(path, RUN_ID)
    assert list(healed.all()) == []
    assert healed.next_sequence() > last
    assert (tmp_path / "own.db.bad").exists() == (damage == "garbage")
    healed.keep(claim(2))
    assert [statement.digest for statement in another_life(path).all()] == [claim(2).digest]
