"""What a node signed is on disk before it is said, and no life of it says anything else."""

from itertools import pairwise
from pathlib import Path

import pytest

from dilocox.node.own import BLOCK, OwnStatements
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import digest, identity

RUN_ID = digest("run")


def claim(serial: int) -> Statement:
    body = pb.Claim(serial=serial, round=2, head=digest("head"), state=digest("state"))
    return seal(identity(1), pb.KIND_CLAIM, RUN_ID, body)


def report() -> Statement:
    body = pb.StateReport(round=2, head=digest("head"), state=digest("state"))
    return seal(identity(1), pb.KIND_STATE_REPORT, RUN_ID, body)


def another_life(path: Path) -> OwnStatements:
    """After `kill -9`: nothing was closed."""
    return OwnStatements(path, RUN_ID)


def test_a_restart_finds_the_newest_of_each_kind(tmp_path: Path):
    own = OwnStatements(tmp_path / "own.db", RUN_ID)
    for statement in (claim(1), report(), claim(2)):
        own.keep(statement)
    found = {statement.kind: statement.digest for statement in another_life(tmp_path / "own.db").all()}
    assert found == {pb.KIND_CLAIM: claim(2).digest, pb.KIND_STATE_REPORT: report().digest}


def test_statements_of_another_run_are_not_said_again(tmp_path: Path):
    OwnStatements(tmp_path / "own.db", RUN_ID).keep(claim(1))
    assert list(OwnStatements(tmp_path / "own.db", digest("another run")).all()) == []


def test_the_sequence_never_goes_back(tmp_path: Path):
    said: list[int] = []
    for _ in range(3):
        own = another_life(tmp_path / "own.db")
        said += [own.next_sequence() for _ in range(BLOCK + 1)]  # over the end of what was reserved
    assert all(later > earlier for earlier, later in pairwise(said))


@pytest.mark.parametrize("damage", ["garbage", "lost"])
def test_a_damaged_file_is_set_aside_and_the_sequence_goes_on(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "own.db"
    monkeypatch.setattr("dilocox.node.own.time.time", lambda: 1_700_000_000.0)
    own = OwnStatements(path, RUN_ID)
    own.keep(claim(1))
    last = max(own.next_sequence() for _ in range(BLOCK // 2))
    own.close()
    for leftover in tmp_path.glob("own.db-*"):
        leftover.unlink()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(b"garbage" * 100)
    monkeypatch.setattr("dilocox.node.own.time.time", lambda: 1_700_000_001.0)
    healed = OwnStatements(path, RUN_ID)
    assert list(healed.all()) == []
    assert healed.next_sequence() > last
    assert (tmp_path / "own.db.bad").exists() == (damage == "garbage")
    healed.keep(claim(2))
    assert [statement.digest for statement in another_life(path).all()] == [claim(2).digest]
