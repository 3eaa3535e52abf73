"""The coordinator's service without a network: hostile input, and restarts that continue the same chain."""

from pathlib import Path

import pytest

from dilocox.coordinator.log import InputLog
from dilocox.coordinator.service import CoordinatorService
from dilocox.node.attest.verify import appraise
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import Outcome
from dilocox.transport.chain_file import ChainFile
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

RUN = manifest(rounds={"count": 3})


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk(Table):
    """Statements made for, and submitted to, a real service on disk."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder, self.clock = RUN, folder, Clock()
        self.open()

    def open(self) -> None:
        chain = ChainFile(self.folder / "chain.db", self.run, COORDINATOR.peer)
        log = InputLog(self.folder / "inputs.db", self.run)
        self.service = CoordinatorService(COORDINATOR, chain, log, pb.Envelope(), appraise, self.clock)

    @property
    def state(self):
        return self.service.state

    def submit(self, statement: Statement):
        self.clock.now += 0.5
        return self.service._judge(statement.envelope)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_restart_at_any_instant_continues_the_same_chain(desk: Desk):
    script = [*(("claim", n) for n in range(3))]
    for _ in range(2):
        script += [("contribution", n) for n in range(3)] + [("receipt", n) for n in range(3)]
    for kind, number in script:
        before = desk.submit(getattr(desk, kind)(number))
        assert before.outcome is Outcome.ACCEPT
        state = desk.state
        desk.open()  # kill -9: nothing was closed
        assert desk.state.head == state.head
        assert desk.state.contributions.keys() == state.contributions.keys()
        assert desk.state.receipts.keys() == state.receipts.keys()
    commits = list(desk.service.chain.verify())
    assert [commit.body.round for commit in commits] == [0, 1, 2]
    assert desk.state.head.round == 3


def test_a_commit_that_was_logged_but_not_stored_is_made_again(desk: Desk):
    desk.genesis()
    desk.contribute().vote()
    commit = desk.service.chain.raw(1)
    desk.service.chain._database.execute("DELETE FROM commits WHERE round = 1")
    desk.open()
    assert desk.service.chain.raw(1) == commit


def test_hostile_statements_are_rejected_with_their_reasons_and_recorded(desk: Desk):
    desk.genesis()
    forged = desk.contribution(0).envelope
    forged.signature = b"\0" * 64
    assert desk.service._judge(forged).reason == pb.REASON_BAD_SIGNATURE
    other_run = seal(identity(0), pb.KIND_LEAVE, digest("other run"), pb.Leave())
    assert desk.service._judge(other_run.envelope).reason == pb.REASON_BAD_SIGNATURE
    assert desk.submit(seal(identity(0), pb.KIND_CONTRIBUTION, RUN.run_id, b"\xff\xff")).reason == pb.REASON_MALFORMED
    large = pb.Envelope(kind=pb.KIND_CLAIM, key=identity(0).key, body=b"x" * (2 << 20), signature=b"s" * 64)
    assert desk.service._judge(large).reason == pb.REASON_OVERSIZE
    assert desk.service._judge(pb.Envelope()).reason == pb.REASON_MALFORMED
    assert desk.submit(desk.contribution(9)).reason == pb.REASON_NOT_ON_ROSTER
    assert desk.submit(desk.contribution(0, round=0)).reason == pb.REASON_STALE_ROUND
    desk.contribute().vote()
    commit = desk.service.chain.commit(1)
    assert commit is not None
    recorded = {item.reason for item in commit.body.refusals}
    expected = {pb.REASON_BAD_SIGNATURE, pb.REASON_MALFORMED, pb.REASON_OVERSIZE}
    expected |= {pb.REASON_NOT_ON_ROSTER, pb.REASON_STALE_ROUND}
    assert expected <= recorded
    assert len(commit.body.counted) == 3


def test_floods_are_cut_off(desk: Desk):
    desk.genesis()
    contribution = desk.contribution(0).envelope
    reasons = [desk.service._judge(contribution).reason for _ in range(1000)]
    assert reasons.count(pb.REASON_RATE) > 500
    desk.clock.now += 60
    assert desk.service._judge(contribution).reason != pb.REASON_RATE


def test_strangers_leave_no_trace_in_the_log(desk: Desk):
    desk.genesis()
    size = sum(1 for _ in desk.service._log.replay())
    for number in range(10, 90):
        desk.submit(desk.contribution(number))
    assert sum(1 for _ in desk.service._log.replay()) - size <= 64


def test_heartbeats_keep_peers_present_and_replays_of_them_do_not(desk: Desk):
    desk.genesis()
    beat = seal(identity(0), pb.KIND_HEARTBEAT, RUN.run_id, pb.Heartbeat(sequence=5, step=3))
    assert desk.submit(beat).outcome is Outcome.ACCEPT
    desk.clock.now += RUN.rounds.liveness_seconds + 1
    desk.service._check_presence(desk.clock.now)
    assert identity(0).peer in desk.state.absent
    assert desk.submit(beat).outcome is Outcome.IGNORE
    assert identity(0).peer in desk.state.absent
    desk.submit(seal(identity(0), pb.KIND_HEARTBEAT, RUN.run_id, pb.Heartbeat(sequence=6)))
    assert identity(0).peer not in desk.state.absent
