"""The coordinator's service without a network: hostile input, presence, and restarts that continue the same chain."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from dilocox.coordinator import service
from dilocox.coordinator.round_log import InputLog
from dilocox.coordinator.service import Contacts, CoordinatorService
from dilocox.node.attest.verify import appraise
from dilocox.node.preflight.network import rounds_trained
from dilocox.protocol import limits
from dilocox.protocol.consensus.rules import Judgement, Outcome
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.net import tls
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from tests.helpers import COORDINATOR, PATIENCE_SECONDS, Table, digest, identity, manifest, until

RUN = manifest(rounds={"count": 3})


class Desk(Table):
    """Statements made for, and submitted to, a real service on disk; `hear` opens a peer's stream."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder, self.now, self.wall = RUN, folder, 1000.0, 1_700_000_000.0
        self.serials: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.streams: dict[int, AsyncGenerator[services.WatchEvent]] = {}
        self.contacts: Contacts | None = None
        self.events: EventLog | None = None
        self.open()

    def open(self) -> None:
        """Open it as a start after `kill -9`: it closed nothing, and its streams are closed."""
        chain = ChainFile(self.folder / "chain.db", self.run)
        self.streams = {}
        clock = lambda: Moment(self.now, int(1000 * (self.wall + self.now)))  # noqa: E731
        parts = {"contacts": self.contacts, "events": self.events}
        self.service = CoordinatorService(COORDINATOR, chain, pb.Envelope(), appraise, clock, **parts)  # type: ignore[arg-type]
        self.service.resume()

    def meet(self, callers: Any = None, directory: Any = None) -> None:
        """Start again, with these."""
        self.contacts = Contacts(callers, directory or Records())
        self.open()

    def keep_events(self) -> EventLog:
        """Start again, with a log of what happens."""
        self.events = EventLog(self.folder / "events.db")
        self.open()
        return self.events

    @property
    def state(self):
        return self.service.state

    @state.setter
    def state(self, value) -> None:
        raise AssertionError("the service holds the state")

    @property
    def ballots(self):  # type: ignore[override]
        return [self.state.gathered.ballot]

    @property
    def commits(self):  # type: ignore[override]
        return list(self.service.chain.commits())

    async def hear(self, *numbers: int) -> None:
        for number in numbers:
            request = services.WatchRequest(from_round=self.service.chain.length, hello=self.beat(number).envelope)
            stream = self.service.follow(request, identity(number).peer, "here")
            await anext(stream)  # the tip
            self.streams[number] = stream
        self.service.look_around()
        await self.service.driver.flush()

    def beat(self, number: int, **changes: Any) -> Statement:
        self.sequences[number] = self.sequences.get(number, 0) + 1
        fields = {"sequence": self.sequences[number], "step": 3, **changes}
        body = pb.Heartbeat(**fields)
        return seal(identity(number), pb.KIND_HEARTBEAT, RUN.run_id, body)

    async def say(self, statement: Statement, connection: str = "") -> Judgement:
        judgement = await self.service.judge(statement.envelope, connection or statement.peer)
        await self.service.driver.flush()
        return judgement

    async def begin(self) -> "Desk":
        await self.hear(0, 1, 2)
        for number in range(3):
            await self.say(self.claim(number))
        assert self.state.head.round == 1
        return self

    async def round(self) -> None:
        for number in range(3):
            await self.say(self.contribution(number))
        for receipt in [self.receipt(number) for number in range(3)]:
            await self.say(receipt)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class Records:
    """Directory that notes its records."""

    def __init__(self) -> None:
        self.known: list[tuple[str, ...]] = []
        self.learned: list[Statement[pb.PeerRecord]] = []

    def know(self, peers: Sequence[str]) -> None:
        self.known.append(tuple(peers))

    def learn(self, record: Statement[pb.PeerRecord]) -> None:
        self.learned.append(record)


async def test_a_coordinator_keeps_what_happened_over_a_restart_in_the_middle_of_a_round(desk: Desk):
    events = desk.keep_events()
    await desk.begin()
    desk.now += 3.0
    await desk.say(desk.contribution(0))
    events.close()
    desk.now += 1.0
    events = desk.keep_events()
    await desk.hear(0, 1, 2)
    desk.now += 3.0
    for number in (1, 2):
        await desk.say(desk.contribution(number))
    for receipt in [desk.receipt(number) for number in range(3)]:
        await desk.say(receipt)
    events.flush()
    kinds = [each.kind for each in events.read(0)]
    assert kinds[:5] == ["claimed", "claimed", "claimed", "round-closed", "roster-changed"]
    assert kinds[-2:] == ["ballot-opened", "round-closed"]
    (ballot,) = [each.body for each in events.read(0, 1) if each.kind == "ballot-opened"]
    came = {each["cluster"]: each["seconds"] for each in ballot["last"]}
    assert came == {identity(0).peer: 3.0, identity(1).peer: 7.0, identity(2).peer: 7.0}
    events.close()


async def test_a_restart_at_any_instant_continues_the_same_chain(desk: Desk):
    await desk.begin()
    script = []
    for _ in range(2):
        script += [("contribution", n) for n in range(3)] + [("receipt", n) for n in range(3)]
    for kind, number in script:
        assert (await desk.say(getattr(desk, kind)(number))).outcome is Outcome.ACCEPT
        before = desk.state
        desk.open()
        assert desk.state.head == before.head
        assert desk.state.gathered == before.gathered
        assert round_machine.phase_of(desk.state) == "starting"
        await desk.hear(0, 1, 2)
    commits = list(desk.service.chain.verify())
    assert [commit.body.round for commit in commits] == [0, 1, 2]
    assert desk.state.head.round == 3


async def test_who_was_not_heard_when_a_round_opened_is_not_heard_by_a_restart(desk: Desk):
    """Reproduce a schedule of the explorer: the restart treated all as live, and closed the round alone."""
    await desk.begin()
    await desk.streams[0].aclose()
    for number in (1, 2):
        await desk.say(desk.contribution(number))
    for receipt in [desk.receipt(number) for number in (1, 2)]:
        await desk.say(receipt)
    assert desk.state.head.round == 2
    for number in (1, 2):
        await desk.say(desk.report(number))
    for number in (1, 2):
        await desk.streams[number].aclose()
    await desk.say(desk.claim(5))
    assert desk.state.head.round == 2
    desk.open()
    assert desk.state.head == desk.service.chain.head
    assert list(desk.state.gathered.claims) == [identity(5).peer]


async def test_a_restart_knows_that_some_were_not_back_when_the_round_opened(desk: Desk):
    await desk.begin()
    for number in range(3):
        await desk.say(desk.contribution(number))
    for receipt in [desk.receipt(number) for number in (1, 2)]:
        await desk.say(receipt)
    receipt = desk.receipt(0)
    desk.now += 1000.1
    desk.open()
    await desk.hear(0, 1)
    desk.now += 0.2
    await desk.say(receipt)
    before = desk.state
    assert before.head.round == 2
    assert before.clock.returning_until == desk.now - 0.2 + RUN.rounds.liveness_seconds
    entries = list(InputLog(desk.service.chain).replay())
    assert round_machine.Returning(before.clock.returning_until) in [entry.event for entry in entries]
    state = round_machine.start(RUN, desk.service.chain.head, entries[0].moment.seconds)
    for entry in entries:
        state, _ = round_machine.decide(state, entry.event, entry.moment)
    assert state == before


async def test_a_log_that_other_rules_wrote_is_followed_as_far_as_the_round_stays_open(desk: Desk, monkeypatch):
    """Check an upgrade: an old input may close the round, but its commit is not on disk, so it was never made."""
    await desk.begin()
    for number in range(3):
        await desk.say(desk.contribution(number))
    for number in range(2):
        await desk.say(desk.receipt(number))
    with monkeypatch.context() as patch:
        patch.setattr(round_machine, "_can_wake", lambda state, moment: len(state.gathered.receipts) > 1)
        desk.open()
        assert len(desk.state.gathered.receipts) == 1
    assert desk.state.head == desk.service.chain.head
    await desk.say(desk.claim(7))
    before = desk.state.gathered.claims
    assert before
    monkeypatch.setattr(round_machine, "_can_wake", lambda state, moment: len(state.gathered.receipts) > 1)
    desk.open()
    assert desk.state.gathered.claims == before, "what came after the start is not lost by the next"


async def test_what_closes_a_round_is_written_with_its_commit(desk: Desk):
    """Check that a queued write never takes the input without the commit."""
    await desk.begin()
    driver = desk.service.driver
    for number in range(3):
        await desk.say(desk.contribution(number))
    receipts = [desk.receipt(number) for number in range(3)]
    async with driver.writing:
        driver.feed(round_machine.Received(receipts[0]))
        waiting = asyncio.create_task(driver.flush())
        await asyncio.sleep(0)  # now it waits
        for receipt in receipts[1:]:
            driver.feed(round_machine.Received(receipt))
    await waiting
    desk.open()
    assert desk.state.head.round == desk.service.chain.length == 2


async def test_who_waits_for_a_write_takes_along_all_who_came_and_no_others(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    """Check that fifty callers at a time cost one write, not fifty."""
    await desk.begin()
    driver, writes, slots = desk.service.driver, list[int](), asyncio.Semaphore(50)
    write = InputLog.write

    async def counted(self: InputLog, batch: Any) -> None:
        writes.append(len(batch))
        await write(self, batch)

    monkeypatch.setattr(InputLog, "write", counted)

    async def one(number: int) -> None:
        async with slots:
            driver.feed(round_machine.Absent(identity(0).peer) if number % 2 else round_machine.Present(identity(0).peer))
            await driver.flush()

    await asyncio.gather(*(one(number) for number in range(1, 501)))
    assert sum(writes) == 500
    assert len(writes) < 50
    assert list(InputLog(desk.service.chain).replay())[-1].event == round_machine.Present(identity(0).peer)


async def test_what_was_not_written_yet_is_forgotten_and_said_again(desk: Desk):
    await desk.begin()
    statement = desk.contribution(0)
    await desk.service.judge(statement.envelope, "peer")  # accepted, and the process dies before the batch is written
    desk.open()
    assert not desk.state.gathered.contributions
    assert (await desk.say(statement)).outcome is Outcome.ACCEPT


async def test_a_vote_is_no_reason_to_tell_everybody_why_the_round_is_open(desk: Desk):
    """Check the rate: a sentence to each of n peers for each of n votes would be n², so it is sent once a second."""
    await desk.begin()
    told: list[str] = []

    async def watch() -> None:
        async for event in desk.service.follow(services.WatchRequest(from_round=1), "", "here"):
            if event.WhichOneof("event") == "tip":
                told.append(event.tip.why)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    assert len(told) == 1
    for number in range(3):
        await desk.say(desk.contribution(number))
        await asyncio.sleep(0)
    assert len(told) == 1
    running = asyncio.create_task(desk.service.run())
    while len(told) == 1:
        await asyncio.sleep(0)
    assert told[1:] == [round_machine.why_open(desk.state)]
    assert "votes" in told[1]
    running.cancel()
    watching.cancel()


async def test_nothing_leaves_before_it_is_on_disk(desk: Desk):
    await desk.begin()
    sent: list[str] = []

    async def watch() -> None:
        async for event in desk.service.follow(services.WatchRequest(from_round=1), "", "here"):
            sent.append(event.WhichOneof("event") or "")

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    for number in range(3):
        await desk.service.judge(desk.contribution(number).envelope, "peer")
    assert desk.state.gathered.ballot is not None
    desk.service.chain.database.close()
    with pytest.raises(Exception, match="closed"):
        await desk.service.driver.flush()
    for _ in range(10):
        await asyncio.sleep(0)
    assert "tip" in sent
    assert "statement" not in sent
    watching.cancel()


async def test_a_write_that_fails_for_a_caller_ends_the_coordinator(desk: Desk):
    """Check that it ends: the caller's statement is in memory and not on disk, so a later write would leave a gap in the
    log."""
    await desk.begin()
    database, driver = desk.service.chain.database, desk.service.driver
    running = asyncio.create_task(driver.run())
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")  # a full disk
    for number in range(limits.REFUSALS_PER_ROUND):
        driver.feed(round_machine.Refused(f"somebody {number}", pb.REASON_RATE, "x" * limits.TEXT_CHARACTERS))
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await desk.say(desk.contribution(0))
    database.execute("PRAGMA max_page_count = 1000000")  # the disk has space again, too late
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await running
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await driver.flush()
    desk.open()
    assert not desk.state.gathered.contributions
    await desk.hear(0, 1, 2)
    await desk.round()
    assert [len(commit.body.counted) for commit in desk.commits] == [0, 3]


async def test_a_caller_that_hangs_up_takes_nobody_s_ballot_with_it(desk: Desk):
    await desk.begin()
    for number in range(3):
        await desk.service.judge(desk.contribution(number).envelope, "peer")
    assert desk.state.gathered.ballot is not None
    calling = asyncio.create_task(desk.service.driver.flush())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not desk.service.driver.writing.locked():  # at each turn of the loop: a write is short
            await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling])
    await desk.service.driver.flush()
    assert desk.service.ballot is not None, "it was told to everybody"


async def test_after_a_start_nothing_is_signed_before_most_are_heard(desk: Desk):
    await desk.begin()
    await desk.round()
    desk.open()
    await desk.hear(0)
    for number in range(3):
        await desk.say(desk.contribution(number))
    assert desk.state.gathered.ballot is None
    assert "restarted" in round_machine.why_open(desk.state)
    await desk.hear(1)
    assert desk.state.gathered.ballot is not None


async def test_a_coordinator_behind_its_own_chain_gets_it_back(desk: Desk, tmp_path: Path):
    await desk.begin()
    await desk.round()
    await desk.round()
    commits = desk.commits
    desk.service.chain.database.execute("DELETE FROM commits WHERE round > 0")
    desk.service.chain.database.execute("DELETE FROM inputs")
    desk.open()
    assert desk.state.head.round == 1
    request = services.WatchRequest(from_round=3, hello=desk.beat(0).envelope)
    stream = desk.service.follow(request, identity(0).peer, "here")
    assert (await anext(stream)).tip.round == 1
    desk.service.look_around()
    assert identity(0).peer in desk.state.absent, "who knows more than we do is not heard before it gave that back"
    for commit in commits[1:]:
        assert (await desk.say(commit)).outcome is Outcome.ACCEPT
    assert desk.state.head.round == 3
    assert (await desk.say(commits[1])).outcome is Outcome.IGNORE
    forged = seal(identity(1), pb.KIND_COMMIT, RUN.run_id, commits[2].body)
    assert (await desk.say(forged)).reason == pb.REASON_BAD_SIGNATURE
    await desk.hear(0, 1)
    assert round_machine.phase_of(desk.state) != "starting"
    assert [commit.digest for commit in desk.service.chain.verify()] == [commit.digest for commit in commits]


@pytest.mark.parametrize("kind", [pb.KIND_COMMIT, pb.KIND_CLAIM, pb.KIND_CONTRIBUTION])
@pytest.mark.parametrize("caller", ["", identity(8).peer])
async def test_submit_junk_under_another_key_is_not_recorded_under_that_key(desk: Desk, kind: pb.Kind, caller: str):
    await desk.begin()
    victim = identity(1)
    junk = pb.Envelope(kind=kind, key=victim.key, body=b"junk", signature=bytes(64))
    judgement = await desk.service.submitted(junk, caller, "somewhere")
    assert judgement.outcome is Outcome.REJECT
    assert victim.peer not in {item.peer for item in desk.state.gathered.refusals}
    assert {item.peer for item in desk.state.gathered.refusals} <= {caller}
    assert not [item for item in desk.state.gathered.refusals if not item.peer]


async def test_hostile_statements_are_rejected_with_their_reasons_and_recorded(desk: Desk):
    await desk.begin()

    async def reason(envelope: pb.Envelope) -> int:
        return (await desk.service.judge(envelope, "somewhere", identity(8).peer)).reason

    forged = desk.contribution(0).envelope
    forged.signature = b"\0" * 64
    assert await reason(forged) == pb.REASON_BAD_SIGNATURE
    other_run = seal(identity(0), pb.KIND_LEAVE, digest("other run"), pb.Leave())
    assert await reason(other_run.envelope) == pb.REASON_BAD_SIGNATURE
    garbage = seal(identity(0), pb.KIND_CONTRIBUTION, RUN.run_id, b"\xff\xff")
    assert await reason(garbage.envelope) == pb.REASON_MALFORMED
    large = pb.Envelope(kind=pb.KIND_CLAIM, key=identity(0).key, body=b"x" * (2 << 20), signature=b"s" * 64)
    assert await reason(large) == pb.REASON_OVERSIZE
    assert await reason(pb.Envelope()) == pb.REASON_MALFORMED
    assert await reason(desk.contribution(9).envelope) == pb.REASON_NOT_ON_ROSTER
    assert await reason(desk.contribution(0, round=0).envelope) == pb.REASON_STALE_ROUND
    await desk.round()
    commit = desk.service.chain.commit(1)
    assert commit is not None
    recorded = {item.reason for item in commit.body.refusals}
    badly_formed = {pb.REASON_BAD_SIGNATURE, pb.REASON_MALFORMED, pb.REASON_OVERSIZE}
    assert {item.peer for item in commit.body.refusals if item.reason in badly_formed} == {identity(8).peer}
    expected = {pb.REASON_BAD_SIGNATURE, pb.REASON_MALFORMED, pb.REASON_OVERSIZE}
    expected |= {pb.REASON_NOT_ON_ROSTER, pb.REASON_STALE_ROUND}
    assert expected <= recorded
    assert len(commit.body.counted) == 3


async def test_whoever_is_refused_fills_no_log(desk: Desk, caplog: pytest.LogCaptureFixture):
    """Check the log: unknown peers could fill a disk with a line for each rejection."""
    await desk.begin()
    for number in range(2 * limits.REFUSALS_PER_ROUND):
        for _ in range(2):
            await desk.service.judge(desk.contribution(1000 + number).envelope, f"address {number}")
    await desk.service.driver.flush()
    lines = [record.message for record in caplog.records if "rejected" in record.message]
    assert len(set(lines)) == len(lines) == limits.REFUSALS_PER_ROUND
    assert "not-on-roster" in lines[0]


async def test_who_sends_a_peers_statements_again_spends_its_own_rate(desk: Desk):
    await desk.begin()
    statement = desk.contribution(0)
    reasons = [(await desk.service.judge(statement.envelope, "mallory")).reason for _ in range(1000)]
    assert reasons.count(pb.REASON_RATE) > 500
    assert (await desk.say(desk.contribution(1))).outcome is Outcome.ACCEPT
    assert (await desk.say(statement, "its own connection")).outcome is Outcome.IGNORE
    desk.now += 60
    assert (await desk.service.judge(statement.envelope, "mallory")).reason != pb.REASON_RATE


async def test_inputs_that_change_nothing_leave_no_trace_in_the_log(desk: Desk):
    await desk.begin()
    statement = desk.contribution(0)
    await desk.say(statement)
    rows = lambda: desk.service.chain.database.execute("SELECT count(*) FROM inputs").fetchone()[0]  # noqa: E731
    size = rows()
    for number in range(3000):
        await desk.service.judge(statement.envelope, f"connection {number}")
    for number in range(10, 90):
        await desk.say(desk.contribution(number), f"stranger {number}")
    assert rows() - size <= limits.REFUSALS_PER_ROUND


async def test_an_open_stream_and_new_heartbeats_are_signs_of_life_and_replays_are_not(desk: Desk):
    await desk.begin()
    old = desk.beat(0)
    assert (await desk.say(old)).outcome is Outcome.ACCEPT
    desk.now += RUN.rounds.liveness_seconds + 1
    for number in (1, 2):
        await desk.say(desk.beat(number))
    desk.service.look_around()
    assert identity(0).peer in desk.state.absent
    assert (await desk.say(old)).outcome is Outcome.IGNORE
    await desk.say(desk.contribution(0), "mallory")
    assert identity(0).peer in desk.state.absent, "somebody said again what it signed"
    await desk.say(desk.beat(0))
    assert identity(0).peer not in desk.state.absent
    await desk.streams[0].aclose()
    assert identity(0).peer in desk.state.absent, "a stream that breaks is absence at once"
    await desk.say(desk.beat(0))
    assert identity(0).peer in desk.state.absent, "and heartbeats without a stream are nobody's"


async def test_a_lead_whose_box_is_away_is_not_waited_for_from_the_moment_it_says_so(desk: Desk):
    await desk.begin()
    assert (await desk.say(desk.beat(0, incomplete=True))).outcome is Outcome.ACCEPT
    assert desk.state.absent == {identity(0).peer}
    desk.service.look_around()
    assert desk.state.absent == {identity(0).peer}, "its stream is open, and says nothing of that"
    await desk.say(desk.beat(0))
    assert not desk.state.absent


async def test_the_boxes_of_a_cluster_are_passed_on_though_its_lead_speaks_for_them(desk: Desk):
    """Reproduce a fault: a follower host's record was forgotten at its seat, so no peer could fetch its stages."""
    await desk.hear(0, 1, 2, 3)
    layout = desk.layout(0, [(0, 0, 1, 0), (3, 1, 1, 0)])
    await desk.say(layout)
    for number in (0, 3):
        await desk.say(desk.claim(number, cluster=layout.digest))
    await desk.say(record(3, 1))
    for number in (1, 2):
        await desk.say(desk.claim(number))
    assert identity(3).peer in desk.state.head.cluster_by_peer
    desk.service.look_around()
    assert identity(3).peer in desk.service.records


async def test_strangers_heartbeats_are_remembered_by_nobody(desk: Desk):
    await desk.begin()
    for number in range(100, 400):
        assert (await desk.say(desk.beat(number))).outcome is Outcome.IGNORE
    assert len(desk.service.liveness.signs) == 3


async def test_a_wall_clock_set_back_opens_the_ballot_no_later(desk: Desk):
    await desk.begin()
    await desk.round()
    desk.wall -= 3600
    await desk.round()
    times = [commit.body.closed_at_ms for commit in desk.commits]
    assert times == sorted(times)
    assert desk.state.head.round == 3


async def test_a_statement_is_brought_by_its_signer_and_a_commit_by_anybody(desk: Desk):
    await desk.begin()
    statement = desk.contribution(0)
    rows = "SELECT count(*) FROM inputs"
    before = desk.service.chain.database.execute(rows).fetchone()
    for caller in ("", identity(9).peer, identity(1).peer):
        judgement = await desk.service.submitted(statement.envelope, caller, "ipv4:192.0.2.1")
        assert judgement.reason == pb.REASON_BAD_SIGNATURE
    nobody = pb.Envelope(kind=pb.KIND_CLAIM, key=b"short")
    assert (await desk.service.submitted(nobody, "", "ipv4:192.0.2.1")).reason == pb.REASON_BAD_SIGNATURE
    await desk.service.driver.flush()
    assert desk.service.chain.database.execute(rows).fetchone() == before, "no row of the log for it"
    assert not desk.state.gathered.refusals
    assert (await desk.service.submitted(statement.envelope, identity(0).peer, "")).outcome is Outcome.ACCEPT
    mine = desk.commits[0].envelope
    assert (await desk.service.submitted(mine, identity(9).peer, "")).outcome is Outcome.IGNORE


async def test_strangers_of_one_address_share_a_rate_and_whom_we_know_has_its_own(desk: Desk):
    await desk.begin()
    reasons = []
    for number in range(100, 100 + 2 * limits.STATEMENTS_BURST):
        claim = seal(identity(number), pb.KIND_HEARTBEAT, RUN.run_id, pb.Heartbeat(sequence=1))
        reasons.append((await desk.service.submitted(claim.envelope, identity(number).peer, "ipv4:192.0.2.1")).reason)
    assert reasons.count(pb.REASON_RATE) >= limits.STATEMENTS_BURST
    mine = await desk.service.submitted(desk.beat(0).envelope, identity(0).peer, "ipv4:192.0.2.1")
    assert mine.outcome is Outcome.ACCEPT


async def test_a_heartbeat_that_overtakes_the_hello_costs_nobody_its_seat(desk: Desk):
    """Reproduce a fault: a restarted daemon's heartbeat arrived before its stream, so it was absent while that stream was
    open."""
    await desk.begin()
    await desk.streams[0].aclose()
    hello, later = desk.beat(0), desk.beat(0)
    await desk.say(later)
    stream = desk.service.follow(services.WatchRequest(from_round=1, hello=hello.envelope), identity(0).peer, "here")
    await anext(stream)
    desk.service.look_around()
    assert identity(0).peer not in desk.state.absent
    assert desk.service.liveness.signs[identity(0).peer].heartbeat == later.body
    await stream.aclose()
    assert identity(0).peer in desk.state.absent


async def test_nobody_says_hello_for_another(desk: Desk):
    await desk.begin()
    await desk.streams[0].aclose()
    desk.service.look_around()
    assert identity(0).peer in desk.state.absent
    hello = desk.beat(0).envelope
    request = services.WatchRequest(from_round=1, hello=hello)
    for caller in ("", identity(9).peer):
        stream = desk.service.follow(request, caller, "here")
        await anext(stream)
        desk.service.look_around()
        assert identity(0).peer in desk.state.absent
        await stream.aclose()
    stream = desk.service.follow(request, identity(0).peer, "here")
    await anext(stream)
    desk.service.look_around()
    assert identity(0).peer not in desk.state.absent
    await stream.aclose()


async def test_streams_of_strangers_are_bounded_and_whom_we_know_always_gets_in(desk: Desk):
    await desk.begin()
    request, open_streams = services.WatchRequest(from_round=1), []

    async def follow(peer: str, address: str) -> bool:
        stream = desk.service.follow(request, peer, address)
        try:
            await anext(stream)
        except RemoteError:
            return False
        open_streams.append(stream)
        return True

    here = [await follow("", "ipv4:192.0.2.1") for _ in range(2 * limits.SPECTATORS_PER_ADDRESS)]
    assert sum(here) == limits.SPECTATORS_PER_ADDRESS
    everywhere = [await follow(identity(n).peer, f"ipv4:198.51.100.{n}") for n in range(10, 10 + 2 * limits.SPECTATORS)]
    assert sum(here) + sum(everywhere) == limits.SPECTATORS
    own = [await follow(identity(0).peer, "ipv4:192.0.2.1") for _ in range(2 * limits.STREAMS_PER_MEMBER)]
    assert sum(own) == limits.STREAMS_PER_MEMBER - 1, "the one that says that it is here is among them"
    await open_streams[0].aclose()
    assert await follow("", "ipv4:192.0.2.1")
    for stream in open_streams:
        await stream.aclose()


def opened(envelope: pb.Envelope) -> pb.Answer:
    """Return the coordinator's answer, verified by its signature."""
    answer = open_envelope(envelope, RUN.run_id, (pb.KIND_ANSWER,))
    assert answer.peer == COORDINATOR.peer
    return answer.body


def record(number: int, sequence: int, address: str = "192.0.2.1:1") -> Statement[pb.PeerRecord]:
    return seal(identity(number), pb.KIND_PEER_RECORD, RUN.run_id, pb.PeerRecord(address=address, sequence=sequence))


async def test_submitted_record_is_learned_only_where_it_is_accepted(desk: Desk):
    records = Records()
    desk.meet(directory=records)
    learned = records.learned
    await desk.begin()

    async def outcome(statement: Statement[pb.PeerRecord]) -> Outcome:
        return (await desk.service.submitted(statement.envelope, statement.peer, "somewhere")).outcome

    first, moved = record(0, 5), record(0, 6, "192.0.2.1:2")
    assert await outcome(first) is Outcome.ACCEPT
    assert learned == [first]
    assert await outcome(first) is Outcome.IGNORE, "already received"
    assert await outcome(record(0, 4)) is Outcome.IGNORE, "older than the newest"
    assert await outcome(record(7, 1)) is Outcome.IGNORE, "of an unknown peer"
    assert learned == [first]
    assert await outcome(moved) is Outcome.ACCEPT
    assert learned == [first, moved]


async def test_the_coordinator_passes_on_how_its_members_are_dialled(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    records = Records()
    desk.meet(directory=records)
    known = records.known

    async def told(*statements: Statement[pb.PeerRecord]) -> list[pb.Envelope]:
        """Return those of the statements that a watcher receives."""
        queue: asyncio.Queue[services.WatchEvent | None] = asyncio.Queue()
        desk.service.watchers.add(queue)
        for statement in statements:
            assert (await desk.say(statement)).reason == pb.REASON_UNSPECIFIED
            desk.service.pass_on_records()
        desk.service.watchers.discard(queue)
        events = [queue.get_nowait() for _ in range(queue.qsize())]
        return [event.statement for event in events if event is not None and event.statement.kind == pb.KIND_PEER_RECORD]

    await desk.begin()
    first, again, moved = record(0, 5), record(0, 6), record(0, 7, "192.0.2.1:2")
    assert await told(first, first, again) == [first.envelope], "what says the same is told once"
    assert await told(moved) == [], "and changes not more often than they can be true"
    monkeypatch.setattr(service, "RECORD_SECONDS", 0.0)
    assert await told() == []
    desk.service.pass_on_records()
    assert desk.service.records == {identity(0).peer: moved}
    assert (await desk.say(record(0, 4))).reason == pb.REASON_STALE_ROUND
    assert (await desk.say(record(7, 1))).reason == pb.REASON_NOT_ON_ROSTER
    await desk.say(desk.claim(7))
    assert await told(record(7, 1)) == [], "who only claims is not passed on"
    assert identity(7).peer in desk.service.records
    stream = desk.service.follow(services.WatchRequest(from_round=desk.service.chain.length), "", "there")
    sent = [await anext(stream) for _ in range(2)]
    assert sent[1].statement == moved.envelope, "who comes later is told too"
    await stream.aclose()
    assert known[-1][0] == COORDINATOR.peer
    assert {identity(number).peer for number in range(3)} < set(known[-1])


async def test_the_server_knows_its_callers(desk: Desk, tmp_path: Path):
    """Check it over real connections."""
    certificate = tls.load_or_create(tmp_path)
    desk.meet(CallerAuth(RUN.run_id, certificate.certificate_der))
    server, port = await create_server("127.0.0.1:0", certificate)
    rpc.add_CoordinatorServicer_to_server(desk.service, server)
    await server.start()
    record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)
    pools = [ChannelPool(), ChannelPool(identity(1), RUN.run_id), ChannelPool(identity(0), RUN.run_id)]
    spectator, other, me = (rpc.CoordinatorStub(pool.channel(record)) for pool in pools)
    claim = desk.claim(0).envelope
    for stub in (spectator, other):
        assert opened(await stub.Submit(claim)).reason == pb.REASON_BAD_SIGNATURE
        with pytest.raises(grpc.aio.AioRpcError, match="must be requested by the peer"):
            await stub.GetChallenge(services.ChallengeRequest(peer=identity(0).peer))
    answer = opened(await me.Submit(claim))
    assert (answer.outcome, answer.statement) == (pb.OUTCOME_ACCEPT, sha256(claim.key, claim.body))
    assert (answer.round, answer.head) == (desk.service.chain.length, desk.service.chain.head.digest)
    assert len((await me.GetChallenge(services.ChallengeRequest(peer=identity(0).peer))).nonce) == 32
    stranger = rpc.CoordinatorStub(ChannelPool(identity(0), digest("another run")).channel(record))
    with pytest.raises(grpc.aio.AioRpcError, match="signature"):
        await stranger.Submit(claim)
    stream = spectator.Watch(services.WatchRequest())
    assert (await anext(aiter(stream))).HasField("tip")
    stream.cancel()
    assert await rounds_trained(spectator, RUN.run_id) == 0, "nobody is here yet"
    await desk.begin()
    assert await rounds_trained(spectator, RUN.run_id) == 0, "one is open"
    for number in range(3):
        await desk.say(desk.contribution(number))
    for receipt in [desk.receipt(number) for number in range(3)]:
        await desk.say(receipt)
    assert await rounds_trained(spectator, RUN.run_id) == desk.service.chain.head.trained == 1
    for pool in pools:
        await pool.close()
    await server.stop(grace=0)


async def test_a_run_that_is_not_public_is_followed_by_who_is_admitted_only(tmp_path: Path):
    admitted = [identity(number).peer for number in (0, 1)]
    run = manifest(admission={"policy": "allow-list", "allow": admitted}, run={"relays": [identity(5).peer]})
    service = CoordinatorService(COORDINATOR, ChainFile(tmp_path / "chain.db", run), pb.Envelope(), appraise)
    service.resume()
    for peer, may in ((admitted[0], True), (identity(5).peer, True), (identity(7).peer, False), ("", False)):
        stream = service.follow(services.WatchRequest(), peer, "here")
        if may:
            assert (await anext(stream)).HasField("tip")
            await stream.aclose()
        else:
            with pytest.raises(RemoteError, match=r"^not-admitted: .*public"):
                await anext(stream)
    service.chain.close()


async def test_claim_of_a_peer_without_a_stream_gets_no_seat(desk: Desk):
    await desk.begin()
    assert (await desk.say(desk.claim(5))).outcome is Outcome.ACCEPT
    assert identity(5).peer in desk.state.absent
    await desk.round()
    assert identity(5).peer not in desk.state.head.roster
    await desk.hear(5)
    assert (await desk.say(desk.claim(5))).outcome is Outcome.ACCEPT
    await desk.round()
    assert identity(5).peer in desk.state.head.roster


async def test_claim_of_a_peer_without_a_stream_does_not_begin_the_run(desk: Desk):
    """Reproduce a fault: it was fed before the peer was noted as absent, so as the last of the first clusters it closed
    genesis, and got a seat."""
    await desk.hear(0, 1)
    for number in (0, 1, 2):
        assert (await desk.say(desk.claim(number))).outcome is Outcome.ACCEPT
    assert desk.state.head.round == 0
    assert identity(2).peer in desk.state.absent


@pytest.mark.parametrize("state", ["their own", "the run's"])
async def test_claims_of_peers_without_a_stream_have_no_part_in_genesis(desk: Desk, state: str):
    """Reproduce a fault: four of them outvoted three live clusters with another state, or received seats beside them."""
    silent, live = (10, 11, 12, 13), (0, 1, 2)
    for number in silent:
        claim = desk.claim(number, state=digest("made up")) if state == "their own" else desk.claim(number)
        assert (await desk.say(claim)).outcome is Outcome.ACCEPT
    await desk.hear(*live)
    for number in live:
        assert (await desk.say(desk.claim(number))).outcome is Outcome.ACCEPT
    assert set(desk.state.head.roster) == {identity(number).peer for number in live}


async def test_claim_of_a_peer_without_a_stream_is_the_same_after_a_restart(desk: Desk):
    """Reproduce a fault: the peer was live after the restart and closed a round in memory, and the log lost it with all
    later inputs."""
    await desk.hear(0, 1)
    for number in (0, 1, 2, 3):
        assert (await desk.say(desk.claim(number))).outcome is Outcome.ACCEPT
    before = set(desk.state.gathered.claims)
    desk.service.chain.close()
    desk.open()
    assert set(desk.state.gathered.claims) == before
    assert desk.state.head.round == 0


def test_buckets_above_the_bound_forget_the_sender_that_called_longest_ago(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "KNOWN_PEERS", 2)
    buckets = service.Buckets(lambda: 0.0)

    def exhaust(sender: str) -> None:
        while buckets.take(sender):
            pass

    exhaust("first")
    exhaust("second")
    assert not buckets.take("first"), "this call makes the second sender the oldest"
    assert buckets.take("third")
    assert not buckets.take("first")
    assert buckets.take("second"), "its bucket was deleted, and begins full"


def test_liveness_at_the_bound_hears_known_peers_and_no_new_one(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "KNOWN_PEERS", 2)
    heard = [desk.service.liveness.hear(desk.beat(number)) for number in (0, 1, 2, 0)]
    assert heard == [True, True, False, True]
    assert not desk.service.liveness.open_stream(identity(2).peer, 0)


async def test_watcher_that_does_not_read_is_dropped_at_the_backlog(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    """Check that it reads the queued messages, and then its stream ends: it catches up from the chain with a new stream."""
    await desk.begin()
    monkeypatch.setattr(service, "WATCH_BACKLOG", 2)
    stream = desk.service.follow(services.WatchRequest(from_round=desk.service.chain.length), identity(0).peer, "here")
    assert (await anext(stream)).HasField("tip")
    reading = asyncio.create_task(anext(stream))
    await until(lambda: desk.service.watchers)
    sent = [desk.contribution(number) for number in range(3)]
    for statement in sent:
        await desk.say(statement)
    assert not desk.service.watchers
    received = [await reading, *[event async for event in stream]]
    assert [event.statement for event in received] == [statement.envelope for statement in sent]


class Call:
    """A call of one peer, as far as the service reads it: both the context and the callers' table."""

    def __init__(self, number: int) -> None:
        self._peer = identity(number).peer

    def peer(self, context: object = None) -> str:
        return self._peer if context is self else "ipv4:192.0.2.1:1"


async def test_contribution_that_was_answered_survives_a_crash(desk: Desk):
    call = Call(0)
    desk.meet(call)
    await desk.begin()
    statement = desk.contribution(0)
    answer = opened(await desk.service.Submit(statement.envelope, call))  # type: ignore[arg-type]
    assert answer.outcome == pb.OUTCOME_ACCEPT
    desk.open()
    assert statement.digest in {kept.digest for slot in desk.state.gathered.contributions.values() for kept in slot}
