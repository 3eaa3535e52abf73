"""Tests of rounds in a run that requires evidence: admission, the evidence of a contribution, and its expiry."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator.service import CoordinatorService
from dilocox.node.attest import simulated
from dilocox.node.attest.verify import appraise
from dilocox.protocol import limits
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.rules import Judgement, Outcome
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.attestation import Appraiser, Claims, Evidence, Verdict, report_data
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.store.chain_file import ChainFile
from dilocox.views import json_views as views
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

MEASUREMENT = b"\x09" * 48
ATTESTED: dict[str, Any] = {
    "rounds": {"count": 9},
    "attestation": {"kinds": ["simulated"], "measurements": {"simulated": [MEASUREMENT.hex()]}, "lifetime_seconds": 100},
}
RUN = manifest(**ATTESTED)


def attested_table(run: Manifest = RUN) -> Table:
    table = Table(run)
    for number in range(3):
        table.attest(number)
    return table.genesis()


def test_only_the_attested_are_admitted():
    table = Table(RUN)
    judgement = table.submit(table.claim(0))
    assert (judgement.outcome, judgement.reason) == (Outcome.REJECT, pb.REASON_NOT_ATTESTED)
    table = attested_table()
    assert table.head.round == 1
    assert set(table.head.attestations) == {identity(n).peer for n in range(3)}
    table.submit(table.claim(7))
    table.contribute().vote()
    assert identity(7).peer not in table.head.roster
    assert pb.REASON_NOT_ATTESTED in {item.reason for item in table.commits[-1].body.refusals}
    table.verify()


def test_verdicts_on_strangers_crowd_nobody_out(monkeypatch: pytest.MonkeyPatch):
    """Check the limit: an idle round would store these verdicts for ever."""
    table = attested_table()
    monkeypatch.setattr(limits, "ATTESTATIONS", 6)
    for number in range(10, 20):
        table.attest(number, seconds=5)
    assert set(table.state.gathered.attested) == {identity(n).peer for n in (10, 11, 12)}, "half of the room"
    table.submit(table.claim(10))
    renewed = table.attest(0, label="renewed")
    assert table.state.gathered.attested[identity(0).peer] == renewed
    table.wait(6)
    table.attest(20)
    there = set(table.state.gathered.attested)
    assert identity(20).peer in there, "what has run out makes room"
    assert identity(10).peer in there, "but not while a claim rests on it"
    table.contribute().vote()
    table.verify()


def test_strangers_who_are_gone_hold_no_verdict_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Check absent unknown peers: their claims depend on expired verdicts, and both are replaced before the run begins."""
    monkeypatch.setattr(limits, "CLUSTERS", 6)
    monkeypatch.setattr(limits, "ATTESTATIONS", 12)
    table = Table(RUN)
    for number in range(10, 16):
        table.attest(number, seconds=100)
        table.submit(table.claim(number))
        table.absent(number)
    table.wait(1000)
    for number in range(3):
        table.attest(number)
        table.submit(table.claim(number))
    assert table.roster() == [0, 1, 2]
    table.verify()


@pytest.mark.parametrize(("standing", "kept"), [(None, 5), (0, 4)], ids=["known", "a stranger"])
def test_what_waits_for_the_next_round_has_room_there(standing: int | None, kept: int, monkeypatch: pytest.MonkeyPatch):
    """Check the limits: unknown peers have half of the space, and a departed peer with reputation is not unknown. A
    restart receives all again, and ends in the coordinator's state."""
    settings = {} if standing is None else {"standing": {"rounds": standing}}
    table = attested_table(manifest(**ATTESTED, **settings))
    monkeypatch.setattr(limits, "ATTESTATIONS", 8)
    for number in range(10, 14):
        table.attest(number)
    table.attest(0, label="renewed")
    table.submit(table.leave(0))
    table.contribute([1, 2]).vote([1, 2])
    assert len(table.state.gathered.attested) == kept
    table.verify()


def test_a_contribution_names_what_it_rests_on_and_the_commit_says_it():
    table = attested_table()
    for spoiled in (b"", b"\x01" * 32):
        judgement = table.submit(table.contribution(0, attestation=spoiled))
        assert judgement.reason == pb.REASON_NOT_ATTESTED
    before = table.head
    table.contribute().vote()
    detail = views.round_detail(before, table.commits[-1].body)
    shown = [item for cluster in detail["clusters"] for item in cluster["attestations"]]
    assert [(item["kind"], item["bound"], item["measurement"]) for item in shown] == [("sev-snp", True, "ab" * 48)] * 3
    table.verify()


def test_a_commit_cannot_change_what_admits_a_host():
    table = attested_table()
    head = table.head
    table.contribute().vote()
    body = pb.Commit.FromString(table.commits[1].envelope.body)
    body.roster[0].hosts[0].attestation.measurement = "cd" * 48
    forged = seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body)
    with pytest.raises(RemoteError, match=r"^malformed: .*roster"):
        chain.extend(RUN, head, forged.envelope)


def test_an_expired_attestation_takes_the_peer_off_the_roster_with_its_reason():
    table = attested_table()
    table.attest(1, label="renewed", seconds=5000)
    table.attest(2, label="renewed", seconds=5000)
    table.now += 2000
    table.contribute().vote()
    assert set(table.head.roster) == {identity(1).peer, identity(2).peer}
    expired = [item.peer for item in table.commits[-1].body.refusals if item.reason == pb.REASON_ATTESTATION_EXPIRED]
    assert expired == [identity(0).peer]
    judgement = table.submit(table.contribution(0))
    assert judgement.reason == pb.REASON_NOT_ON_ROSTER
    table.attest(0, label="again")
    assert table.submit(table.claim(0)).outcome is Outcome.ACCEPT
    table.contribute([1, 2]).vote([1, 2])
    assert identity(0).peer in table.head.roster
    table.verify()


def test_a_verdict_before_the_claims_round_is_not_forgotten():
    table = attested_table()
    table.attest(5)
    table.contribute().vote()
    assert table.submit(table.claim(5)).outcome is Outcome.ACCEPT
    table.contribute().vote()
    assert identity(5).peer in table.head.roster
    table.verify()


class Desk:
    """A real coordinator service on disk, and peers that answer its challenges."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1000.0
        self.open()

    def open(self, appraiser: Appraiser = appraise) -> None:
        chain_file = ChainFile(self.folder / "chain.db", RUN)
        clock = lambda: Moment(self.now, int(1000 * self.now))  # noqa: E731
        self.service = CoordinatorService(COORDINATOR, chain_file, pb.Envelope(), appraiser, clock)
        self.service.resume()

    def challenge(self, number: int) -> bytes:
        return self.service.challenge(identity(number).peer)

    def evidence(
        self, number: int, nonce: bytes, run: bytes = RUN.run_id, measurement: bytes = MEASUREMENT
    ) -> pb.BoundEvidence:
        data = report_data("simulated", identity(number).key, run, nonce)
        quote = simulated.make(data, measurement).message()
        return pb.BoundEvidence(key=identity(number).key, run=run, nonce=nonce, evidence=quote)

    def answer(self, number: int, body: pb.BoundEvidence) -> Judgement:
        statement = seal(identity(number), pb.KIND_EVIDENCE, RUN.run_id, body)
        judgement = asyncio.run(self.service.judge(statement.envelope, "peer"))
        asyncio.run(self.service.driver.flush())
        return judgement


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def code(judgement: Judgement) -> str:
    assert judgement.outcome is Outcome.REJECT
    assert judgement.reason == pb.REASON_ATTESTATION
    return judgement.detail.partition(":")[0]


def test_good_evidence_is_accepted_and_survives_a_restart(desk: Desk):
    judgement = desk.answer(0, desk.evidence(0, desk.challenge(0)))
    assert (judgement.outcome, judgement.valid_until_ms) == (Outcome.ACCEPT, 1_100_000)
    before = desk.service.state.gathered.attested
    assert before[identity(0).peer].valid_until_ms == 1_100_000
    desk.open()
    assert desk.service.state.gathered.attested == before


def test_every_way_to_borrow_evidence_has_its_own_reason(desk: Desk):
    nonce = desk.challenge(0)
    others = desk.evidence(1, desk.challenge(1))
    assert code(desk.answer(0, others)) == "peer"
    lying = desk.evidence(1, nonce)
    lying.key = identity(0).key
    assert code(desk.answer(0, lying)) == "report-data"
    assert code(desk.answer(0, desk.evidence(0, desk.challenge(1)))) == "nonce"
    assert code(desk.answer(0, desk.evidence(0, desk.challenge(0), run=b"\x07" * 32))) == "run"
    other_run = desk.evidence(0, (fresh := desk.challenge(0)), run=b"\x07" * 32)
    other_run.run = RUN.run_id
    assert fresh == other_run.nonce
    assert code(desk.answer(0, other_run)) == "report-data"
    good = desk.evidence(0, desk.challenge(0))
    assert desk.answer(0, good).outcome is Outcome.ACCEPT
    assert code(desk.answer(0, good)) == "nonce"
    assert code(desk.answer(0, desk.evidence(0, b"\x01" * 32))) == "nonce"
    assert code(desk.answer(0, desk.evidence(0, desk.challenge(0), measurement=b"\x08" * 48))) == "measurement"
    refused = {item.detail.partition(":")[0] for item in desk.service.state.gathered.refusals}
    assert refused == {"peer", "report-data", "nonce", "run", "measurement"}


def test_evidence_that_is_not_evidence_is_refused(desk: Desk):
    body = desk.evidence(0, desk.challenge(0))
    body.evidence.blob = b"x" * 100_000
    assert code(desk.answer(0, body)) == "oversize"
    body = desk.evidence(0, desk.challenge(0))
    body.evidence.kind = "tdx"
    assert code(desk.answer(0, body)) == "kind"
    body.evidence.CopyFrom(Evidence("simulated", b"").message())
    body.nonce = desk.challenge(0)
    assert code(desk.answer(0, body)) == "malformed"


async def test_evidence_of_strangers_keeps_no_disk_and_no_member_waiting(desk: Desk):
    go = threading.Event()

    def slow(*asked: Any) -> tuple[Verdict, Claims | None]:
        go.wait()
        return appraise(*asked)

    def judging(number: int, sender: str) -> asyncio.Task[Judgement]:
        body = desk.evidence(number, desk.challenge(number))
        statement = seal(identity(number), pb.KIND_EVIDENCE, RUN.run_id, body)
        return asyncio.create_task(desk.service.judge(statement.envelope, sender))

    member = identity(0).peer
    assert (await judging(0, "an address")).outcome is Outcome.ACCEPT
    claim = seal(identity(0), pb.KIND_CLAIM, RUN.run_id, pb.Claim(serial=1, round=1, state=digest("state")))
    assert (await desk.service.judge(claim.envelope, member)).outcome is Outcome.ACCEPT
    await desk.service.driver.flush()
    desk.open(slow)
    coming = [judging(number, f"address {number}") for number in range(10, 10 + limits.APPRAISALS)]
    coming.append(judging(0, member))
    more = [judging(number, sender) for number, sender in ((50, "address 10"), (51, "another address"), (0, member))]
    try:
        await asyncio.sleep(0)
        assert [each.done() and each.result().reason for each in more] == [pb.REASON_RATE] * 3, "one each, and of few strangers"
        for _ in range(2 * limits.APPRAISALS):
            await asyncio.to_thread(int)  # as a write of the log does
        assert not any(each.done() for each in coming)
    finally:
        go.set()
    assert {judged.outcome for judged in await asyncio.gather(*coming)} == {Outcome.ACCEPT}
    assert (await judging(50, "address 10")).outcome is Outcome.ACCEPT


def test_an_evidence_statement_is_bounded():
    bad = pb.BoundEvidence(key=b"1", run=RUN.run_id, nonce=bytes(32))
    statement: Statement = seal(identity(0), pb.KIND_EVIDENCE, RUN.run_id, bad)
    with pytest.raises(RemoteError):
        open_envelope(statement.envelope, RUN.run_id, (pb.KIND_EVIDENCE,))
