"""Tests of the log that several coordinators share, over the fake store: the leader writes, a follower has everything, a
former leader is rejected."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dilocox.coordinator import log_chunks, shared_log
from dilocox.coordinator.kv_store import Found, Item, Put, StoreError
from dilocox.coordinator.round_log import Committed, Entry, InputLog, KeptFirst, LogItem
from dilocox.coordinator.shared_log import BehindError, Candidate, DeposedError, SharedLog, UnreadableError
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import log_pb2
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.transport.store.chain_file import ChainFile
from tests.fake_store import FakeStore
from tests.helpers import Table, digest, identity, manifest

RUN = manifest(rounds={"count": 40})


class Line:
    """Link between a coordinator and the store: it loses the requests or answers that `loses` names."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.loses: Callable[[str, tuple[Any, ...]], str] = lambda call, arguments: ""
        """'' lets it through; 'request' and 'answer' are lost."""
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Callable[..., Any]:
        async def ask(*arguments: Any) -> Any:
            self.calls.append(call)
            lost = self.loses(call, arguments)
            answer = await getattr(self.store, call)(*arguments) if lost != "request" else None
            if lost:
                raise StoreError(f"the {lost} was lost")
            return answer

        return ask


@dataclass
class Office:
    """Coordinator's log, chain and link."""

    chain: ChainFile
    line: Line
    log: SharedLog

    @property
    def entries(self) -> list[round_machine.Input]:
        return [entry.event for entry in self.log.replay()]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.store = FakeStore(lambda: self.now)
        self.table = Table(RUN).genesis().train(30)
        """Commits to write."""
        self.count = 0

    async def office(self, number: int, commits: int = 0) -> Office:
        """Return coordinator `number`, with `commits` commits in its chain."""
        self.count += 1
        chain = ChainFile(self.folder / f"{number}-{self.count}.db", RUN)
        for commit in self.table.commits[:commits]:
            chain.append(commit.envelope)
        me = Candidate(f"office {number}", f"192.0.2.{number}:1", bytes([number] * 32).hex())
        line = Line(self.store)
        log = SharedLog(line, "test", chain, me, lambda: Moment(self.now, int(1000 * self.now)))
        await log.enter()
        return Office(chain, line, log)

    async def leader(self, number: int, commits: int = 0) -> Office:
        office = await self.office(number, commits)
        assert await office.log.stand()
        return office

    def later(self) -> None:
        self.now += shared_log.LEASE_SECONDS + 1

    def entry(self, number: int) -> Entry:
        return Entry(round_machine.Absent(identity(number).peer), Moment(self.now, int(1000 * self.now)))

    def commit(self, number: int, chain: ChainFile) -> list[LogItem]:
        commit = self.table.commits[number]
        return [Committed(chain.head, commit, chain.head)]

    async def write_commits(self, office: Office, first: int, until: int) -> None:
        for number in range(first, until):
            await office.log.write(self.commit(number, office.chain))
            office.chain.head = ChainFile(office.chain.path, RUN).head

    def keys(self, what: str) -> list[str]:
        return [key for key in sorted(self.store.items) if f"/{what}" in key]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_who_follows_takes_over_with_all_that_was_written(world: World):
    one, two = await world.leader(1), await world.office(2)
    assert not await two.log.stand()
    assert two.log.leader is not None
    assert two.log.leader.name == "office 1"
    await world.write_commits(one, 0, 2)
    await one.log.write([world.entry(0), world.entry(1)])
    assert not await two.log.stand()
    assert two.chain.length == 2, "as they are appended"
    await one.log.write([world.entry(2)])
    world.later()
    assert await two.log.stand()
    assert two.entries == [world.entry(number).event for number in range(3)]
    assert not two.log.healed
    with pytest.raises(DeposedError, match="another coordinator leads"):
        await one.log.write([world.entry(3)])
    assert len(two.entries) == 3


async def test_a_leader_whose_lease_ended_is_refused_though_nobody_took_over(world: World):
    one = await world.leader(1)
    world.later()
    with pytest.raises(DeposedError, match="lease"):
        await one.log.write([world.entry(0)])
    assert len(world.keys("log/")) == 1, "what it began with"
    assert await one.log.stand(), "it may lead again"
    await one.log.write([world.entry(0)])


async def test_who_leads_keeps_its_lease_and_hears_that_it_is_gone(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_log, "KEEP_SECONDS", 0.0)
    one = await world.leader(1)
    keeping = asyncio.create_task(one.log.keep_office())
    for _ in range(4):
        before = one.line.calls.count("keep")
        while one.line.calls.count("keep") < before + 2:
            await asyncio.sleep(0)
        world.now += shared_log.LEASE_SECONDS - 1
    assert not keeping.done()
    two = await world.office(2)
    assert not await two.log.stand()
    one.line.loses = lambda call, arguments: "request"
    world.later()
    assert await two.log.stand()
    one.line.loses = lambda call, arguments: ""
    with pytest.raises(DeposedError):
        await keeping


async def test_who_resigns_is_followed_at_once(world: World):
    one, two = await world.leader(1), await world.office(2)
    await one.log.resign()
    assert await two.log.stand()
    with pytest.raises(DeposedError):
        await one.log.write([world.entry(0)])


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_what_is_sent_again_is_applied_once(world: World, lost: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_log, "AGAIN_SECONDS", 0.0)
    one = await world.leader(1)
    tries = iter([lost, lost, ""] * 100)
    one.line.loses = lambda call, arguments: next(tries) if call == "apply" else ""
    await world.write_commits(one, 0, 1)
    await one.log.write([world.entry(0)])
    await one.log.write([world.entry(1)])
    two = await world.office(2)
    assert not await two.log.stand()
    assert two.entries == [world.entry(0).event, world.entry(1).event]
    assert len(world.keys("log/")) == 4, "the first is what the log began with"


async def test_an_election_whose_answer_was_lost_is_won_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_log, "AGAIN_SECONDS", 0.0)
    one = await world.office(1)
    tries = iter(["answer", *[""] * 100])
    one.line.loses = lambda call, arguments: next(tries) if call == "apply" else ""
    assert await one.log.stand()
    await one.log.write([world.entry(0)])


async def test_a_transaction_that_arrives_late_once_more_changes_nothing(world: World):
    """Check it also when the part that it wrote is deleted."""
    one = await world.leader(1)
    sent: list[tuple[Any, ...]] = []
    one.line.loses = lambda call, arguments: sent.append(arguments) or "" if call == "apply" else ""  # type: ignore[func-returns-value]
    await one.log.write([world.entry(0)])
    await world.write_commits(one, 0, shared_log.COMMITS_KEPT + 2)
    before = dict(world.store.items)
    assert sent[0][1][0].key not in before, "it is gone"
    for arguments in sent:
        found: Found = await world.store.apply(*arguments)
        assert not found.applied
    assert world.store.items == before


async def test_a_large_batch_goes_in_parts_and_counts_whole_or_not_at_all(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_chunks, "PART_BYTES", 200)
    one = await world.leader(1)
    await one.log.write([world.entry(9)])
    whole = [world.entry(number) for number in range(20)]
    written = 0

    def loses(call: str, arguments: tuple[Any, ...]) -> str:
        nonlocal written
        written += call == "apply"
        if written == 3:
            world.later()
        return ""

    one.line.loses = loses
    with pytest.raises(DeposedError):
        await one.log.write(whole)
    assert len(world.keys("log/")) == 4, "two of its parts"
    two = await world.leader(2)
    assert two.entries == [world.entry(9).event]
    await two.log.write(whole)
    three = await world.office(3)
    await three.log.follow()
    assert three.entries == [world.entry(number).event for number in (9, *range(20))]
    assert all(len(item.value) <= 209 for key, item in world.store.items.items() if "/log/" in key)


def test_the_largest_commit_fits_what_etcd_takes():
    assert FakeStore(lambda: 0.0).most_bytes > log_chunks.PART_BYTES + 1024


async def test_what_a_commit_cut_is_deleted_and_nothing_else(world: World):
    strange = ["test/other", "tes", f"test/{RUN.run_id.hex()}1/log/0000000000000001", f"test/{'00' * 32}/log/0"]
    await world.store.apply((), [Put(key, b"theirs") for key in strange])
    one = await world.leader(1)
    kept = shared_log.COMMITS_KEPT
    for number in range(kept + 6):
        await one.log.write([world.entry(1)])
        await world.write_commits(one, number, number + 1)
    assert len(world.keys("log/")) == 2 * kept - 1 + 2
    assert all(world.store.items[key].value == b"theirs" for key in strange)
    two = await world.office(2)
    with pytest.raises(BehindError) as caught:
        await two.log.follow()
    assert caught.value.round == 6
    for commit in world.table.commits[:6]:
        two.chain.append(commit.envelope)
    two.log.begin_again()
    await two.log.follow()
    assert two.chain.length == kept + 6
    three = await world.office(3, 10)
    await three.log.follow()
    assert three.chain.length == kept + 6


async def test_keys_of_others_are_left_alone(world: World):
    await world.store.apply((), [Put(f"test/{RUN.run_id.hex()}/a", b"theirs")])
    with pytest.raises(ConfigError, match="another prefix"):
        await world.office(1)


async def test_a_chain_that_moves_into_the_store_brings_its_open_round(world: World):
    office = await world.office(1, 3)
    InputLog(office.chain).write_now([world.entry(0)])
    assert await office.log.stand()
    assert office.entries == [world.entry(0).event]
    assert not office.log.healed
    two = await world.office(2)
    with pytest.raises(BehindError):
        await two.log.follow()
    three = await world.office(3, 3)
    await three.log.follow()
    assert three.entries == [world.entry(0).event]


async def test_a_store_that_was_restored_from_an_old_copy_is_told_what_it_lacks(world: World):
    one = await world.leader(1)
    await world.write_commits(one, 0, 2)
    copy = dict(world.store.items)
    await world.write_commits(one, 2, 4)
    await one.log.resign()
    world.store.items = {key: item for key, item in copy.items() if not key.endswith("/leader")}
    again = await world.office(2, 4)
    assert await again.log.stand()
    assert again.log.healed, "more than half of the roster must be heard"
    assert not again.entries
    follower = await world.office(3, 1)
    await follower.log.follow()
    assert follower.chain.length == 4


def restore(world: World, copy: dict[str, Item]) -> None:
    """Restore the store's earlier content; leases end with it."""
    world.store.items = {key: item for key, item in copy.items() if not key.endswith("/leader")}
    world.store.leases.clear()
    world.store.held.clear()


async def test_a_leader_of_a_restored_store_stands_by_and_tells_it_what_it_lacks(world: World):
    """Check it, although its lease and its key are in the copy."""
    one = await world.leader(1)
    await world.write_commits(one, 0, 1)
    copy = dict(world.store.items)
    await world.write_commits(one, 1, 3)
    world.store.items = copy
    with pytest.raises(DeposedError, match="restored from a copy"):
        await one.log.write([world.entry(0)])
    await one.log.resign()
    again = await world.office(1, 3)
    assert await again.log.stand()
    assert again.log.healed
    follower = await world.office(3)
    await follower.log.follow()
    assert follower.chain.length == 3


async def test_who_followed_what_a_restored_store_forgot_reads_it_again(world: World):
    """Check a standby whose log continued with other inputs under the same numbers."""
    one, two = await world.leader(1), await world.office(2)
    await world.write_commits(one, 0, 1)
    copy = dict(world.store.items)
    await one.log.write([world.entry(0)])
    assert not await two.log.stand()
    restore(world, copy)
    three = await world.leader(3, 1)
    await three.log.write([world.entry(1)])
    await three.log.write([world.entry(2)])
    await three.log.resign()
    assert await two.log.stand()
    assert two.entries == [world.entry(1).event, world.entry(2).event]


async def test_a_leader_of_the_lost_future_is_refused_at_the_same_revision(world: World):
    """Check a leader's name: no other incarnation repeats it, even if the store counts its revisions again."""
    one = await world.leader(1)
    copy = dict(world.store.items)
    restore(world, {key: item for key, item in copy.items() if "/log/" not in key and not key.endswith("/next")})
    await world.leader(2)
    (end,) = world.keys("next")
    assert world.store.items[end] == copy[end], "as far as its part's number goes, it could write"
    with pytest.raises(DeposedError, match="another coordinator leads"):
        await one.log.write([world.entry(0)])


async def test_who_shared_its_rounds_before_does_not_trust_its_own_chain_in_an_empty_store(world: World):
    one, two = await world.leader(1, 2), await world.office(2, 2)
    assert not one.log.healed, "it was alone until now: its chain is all there is"
    assert not await two.log.stand()
    restore(world, {})
    assert await two.log.stand()
    assert two.log.healed, "another may have signed what it lacks"
    assert [place.name for place in two.log.places] == ["office 2"]
    three = await world.office(3, 2)
    assert not await three.log.stand(), "whose keys these are is there again"
    await one.log.refresh()
    assert len(world.keys("places/")) == 3


async def test_who_lacks_what_the_log_keeps_no_more_is_never_elected(world: World):
    one = await world.leader(1)
    await world.write_commits(one, 0, 20)
    two = await world.office(2)
    for later in (False, True):  # also without a leader to ask
        if later:
            world.later()
        for _ in range(20):
            with pytest.raises(BehindError):
                await two.log.stand()
    for commit in world.table.commits[two.chain.length : 20]:
        two.chain.append(commit.envelope)
    assert await two.log.stand()
    assert two.chain.length == 20


async def test_a_link_has_room_for_all_that_enter(world: World):
    offices = [await world.office(number) for number in range(1, limits.COORDINATORS + 1)]
    await offices[0].log.enter()  # once more
    with pytest.raises(ConfigError, match="names 8 coordinators"):
        await world.office(limits.COORDINATORS + 1)


async def test_a_place_that_no_coordinator_wrote_is_passed_over(world: World):
    one = await world.leader(1)
    [mine] = world.keys("places/")
    said = world.store.items[mine].value
    for number, bad in enumerate((b"x", b"{}", said.replace(b"192.0.2.1:1", b"nowhere"))):
        await world.store.apply((), [Put(f"{mine[:-16]}{number:016x}", bad)])
    await one.log.refresh()
    assert [place.address for place in one.log.places] == ["192.0.2.1:1"]


async def test_another_chain_is_never_followed(world: World):
    one = await world.leader(1)
    await world.write_commits(one, 0, 2)
    other = Table(RUN).genesis().train(1, seconds=3.0)
    two = await world.office(2)
    for commit in other.commits:
        two.chain.append(commit.envelope)
    with pytest.raises(ConfigError, match="two chains"):
        await two.log.stand()


async def test_inputs_that_were_given_up_are_given_up_for_all(world: World):
    one = await world.leader(1)
    await world.write_commits(one, 0, 1)
    await one.log.write([world.entry(number) for number in range(3)])
    await one.log.write([KeptFirst(1), world.entry(7)])
    two = await world.office(2)
    await two.log.follow()
    assert two.entries == [world.entry(0).event, world.entry(7).event]


async def test_every_life_of_a_leader_has_a_higher_number(world: World):
    one = await world.leader(1)
    assert await one.log.number_of_life(500) == 500
    await one.log.resign()
    two = await world.leader(2)
    assert await two.log.number_of_life(3) == 501


async def test_every_coordinator_knows_where_all_are(world: World):
    one = await world.leader(1)
    two = await world.office(2)
    for office in (one, two):
        await office.log.refresh()
        assert [place.address for place in office.log.places] == ["192.0.2.1:1", "192.0.2.2:1"]


async def test_a_damaged_log_is_nobodys_round(world: World):
    one = await world.leader(1)
    await one.log.write([world.entry(0)])
    _, key = world.keys("log/")
    for value in (b"", b"\x00", b"\x02abc", b"\x03\xff\xff"):
        await world.store.apply((), [Put(key, world.store.items[key].value[:8] + value)])
        with pytest.raises(UnreadableError, match=r"not written by a coordinator|damaged"):
            await (await world.office(2)).log.follow()


async def test_a_log_that_is_mended_is_followed_from_its_beginning(world: World):
    """Check it also if the log contains an invalid statement."""
    one, two = await world.leader(1), await world.office(2)
    await world.write_commits(one, 0, 1)
    await one.log.write([world.entry(0)])
    *_, key = world.keys("log/")
    good = world.store.items[key].value
    forged = pb.Envelope.FromString(world.table.commits[1].envelope.SerializeToString())
    forged.signature = bytes(64)
    (bad,) = log_chunks.in_parts(iter([log_pb2.LogRow(kind="received", envelope=forged.SerializeToString())]))
    await world.store.apply((), [Put(key, good[:8] + bad)])
    for _ in range(2):
        with pytest.raises(UnreadableError, match="cannot follow"):
            await two.log.stand()
    await world.store.apply((), [Put(key, good)])
    assert not await two.log.stand()
    assert (two.chain.length, two.entries) == (1, [world.entry(0).event])


class KilledError(Exception):
    """Kill, as by `kill -9`, between two requests."""


async def test_a_chain_moves_in_whole_or_not_at_all(world: World, monkeypatch: pytest.MonkeyPatch):
    """Check every point of a kill, and every later leader: the run continues from its chain, or waits for it."""
    monkeypatch.setattr(log_chunks, "PART_BYTES", 400)
    for last in range(1, 30):
        world.store = FakeStore(lambda: world.now)
        one = await world.office(1, 3)
        InputLog(one.chain).write_now([world.entry(0)])
        sent = iter(range(last))

        def loses(call: str, arguments: tuple[Any, ...], sent: Iterator[int] = sent) -> str:
            if call == "apply" and next(sent, None) is None:
                raise KilledError
            return ""

        one.line.loses = loses
        try:
            await one.log.stand()
            break
        except KilledError:
            world.later()
        began = bool(world.keys("log/"))
        stranger = await world.office(2)
        if began:  # otherwise no other coordinator can know that there is a chain
            with pytest.raises((UnreadableError, BehindError)):
                await stranger.log.stand()
            assert not world.keys("leader"), "it keeps nobody from the lead"
            again = await world.office(3, 3)
            assert await again.log.stand()
            assert again.chain.length == 3
            two = await world.office(4, 2)
            await two.log.follow()
            assert two.chain.length == 3
    else:
        pytest.fail("it never came to an end")
    assert last > 4, "in several parts"


def test_inputs_of_another_machine_are_moved_to_our_clock():
    def entry(event: round_machine.Input, seconds: float, wall: float) -> Entry:
        return Entry(event, Moment(seconds, int(1000 * wall)))

    first: Sequence[Entry] = [entry(round_machine.Tick(), 9000.0, 100.0), entry(round_machine.Returning(9007.0), 9005.0, 103.0)]
    second = [entry(round_machine.Resumed(), 50.0, 110.0), entry(round_machine.Absent("x"), 51.0, 111.0)]
    moved = log_chunks.on_our_clock([*first, *second], Moment(7.0, 120_000))
    assert [each.moment.seconds for each in moved] == [-15.0, -10.0, -3.0, -2.0], "five seconds passed for who wrote them"
    assert moved[1].event == round_machine.Returning(-8.0)
    assert [each.moment.wall_ms for each in moved] == [each.moment.wall_ms for each in (*first, *second)]


def test_every_input_is_read_as_it_was_written():
    table = Table(RUN).genesis()
    attested = pb.Attestation(peer="p", nonce=digest("n"), kind="k", measurement="m", valid_until_ms=5)
    events: list[round_machine.Input] = [
        round_machine.Received(table.contribution(0)),
        round_machine.Received(table.contribution(1), live=False),
        round_machine.Refused("p", pb.REASON_RATE, "why"),
        round_machine.Absent("p"),
        round_machine.Present("p"),
        round_machine.Resumed(True),
        round_machine.Returning(1 / 3),
        round_machine.Attested(attested),
        round_machine.Tick(),
    ]
    rows = log_chunks.rows_of([Entry(event, Moment(0.1, 7)) for event in events])
    batch, (part,) = log_chunks.Batch(), log_chunks.in_parts(rows)
    found = batch.take(0, part)
    assert found is not None
    assert [log_chunks.entry_of(row, RUN.run_id) for row in found] == [Entry(event, Moment(0.1, 7)) for event in events]
