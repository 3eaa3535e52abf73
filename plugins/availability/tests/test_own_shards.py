"""Test of the loss of half of the roster with its disks: the committed blobs are restored from the shards of the rest."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from threading import Event

import pytest

pytest.importorskip("pyeclib", reason="pip install ./plugins/availability")

from dilocox.node.exchange.downloader import Downloader
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.protocol import limits
from dilocox.protocol.checks import availability_rules
from dilocox.protocol.checks.availability import Sampled
from dilocox.protocol.consensus.chain import NamedBy, taken
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.member import member
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Availability
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox_availability import erasure, probes
from dilocox_availability import shards as shares
from dilocox_availability.command import show, told
from dilocox_availability.own_shards import Sharing, named_by
from dilocox_availability.probes import Asker, Sample, Sampler, askable
from dilocox_availability.restoring import ASKED_AT_ONCE, Answer, Restorer
from dilocox_availability.shards import Code
from dilocox_availability.store import ShareStore, share_bytes
from tests.archived import RealTable, real_run
from tests.helpers import identity, serve_also
from tests.peers import Peer, meeting

PEERS, ROUNDS = 6, 3
NO_SHARD = "it has no shard that the commit proves, or is not reachable"


@pytest.fixture(autouse=True)
def _disk_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the disk's syncs for a hundred small files a round; test_share_store.py and test_files.py check their survival."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def _shares_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shards at once in `follow`."""
    monkeypatch.setattr(probes, "SETTLED", 1)


@dataclass
class Sharer:
    peer: Peer
    sharing: Sharing
    starts: ResumePlanner

    @property
    def kept(self) -> ShareStore:
        return self.sharing.shares

    def follow(self, table: RealTable, number: int) -> None:
        """Follow a round as a node does: it has everything that the commit counts, shares it, and deletes unused blobs."""
        for digest in table.store.digests():
            if digest not in self.peer.store:
                self.peer.store.put([table.store.read(digest)])
        if number >= self.peer.chain.length:
            self.peer.chain.append(table.commits[number].envelope)
        self.sharing.update()
        states = {
            n: dict(enumerate(self.peer.store.stage_digests(c.body.state))) for n, c in enumerate(table.commits[: number + 1])
        }
        roots = {n: c.body.state for n, c in enumerate(table.commits[: number + 1])}
        worth = self.starts.worth_keeping() | self.starts.own_worth_keeping(states, roots)
        self.peer.store.sweep(self.peer.store.digests() - worth)


@asynccontextmanager
async def sharing(folder: Path, count: int = 1, **settings: object) -> AsyncIterator[tuple[RealTable, list[Sharer]]]:
    """Run six clusters of a run with erasure shards, after some rounds."""
    (folder / "table").mkdir()
    run = real_run(
        BlobStore(folder / "table" / "data"), model={"stages": 2}, rounds={"start_clusters": PEERS}, availability=settings
    )
    table = RealTable(run, BlobStore(folder / "table" / "blobs"))
    table.genesis(range(PEERS))
    async with meeting(folder, run, *[list(table.commits)] * PEERS) as peers:
        sharers = []
        for peer in peers:
            starts = peer.exchange.starts(peer.chain)
            mine = Sharing(run, peer.chain, peer.store, peer.shards.shelf, identity(peer.number).peer, starts.oldest_kept)
            sharers.append(Sharer(peer, mine, starts))
        for _ in range(count):
            table.train(1, range(PEERS))
            for sharer in sharers:
                sharer.follow(table, len(table.commits) - 1)
        yield table, sharers


def lose(folder: Path, sharers: list[Sharer]) -> None:
    """Remove sharers with their disks."""
    for sharer in sharers:
        del sharer.peer.everybody.records[identity(sharer.peer.number).peer]
        for name in ("blobs", "shares"):
            shutil.rmtree(folder / str(sharer.peer.number) / name)


async def test_half_of_the_roster_goes_with_its_disks_and_everything_is_restored(tmp_path: Path):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        gone, left = sharers[: PEERS // 2], sharers[PEERS // 2 :]
        lose(tmp_path, gone)
        for sharer in left:  # nor has any peer a whole blob any more
            sharer.peer.store.sweep(sharer.peer.store.digests())
        one = left[0].peer
        payloads = 0
        for commit in table.commits[1:]:
            apply = await one.exchange.applies.take(commit)
            assert len(apply.takes) == PEERS
            for item, take in zip(taken(commit.body), apply.takes, strict=True):
                assert one.store.verify(item.contribution.leaves)
                for digest in take.payloads:
                    assert one.store.verify(digest)
                    assert one.store.read(digest) == table.store.read(digest)
                    payloads += 1
        assert payloads == PEERS * ROUNDS * table.run.model.stages
        newest = table.run.snapshot_round(table.commits[-1].body.round)
        root = table.commits[newest].body.state
        for stage, digest in enumerate(await left[0].starts.stages_of(newest, root)):
            await one.exchange.downloader.fetch(
                digest, left[0].starts.keepers(newest), stage=stage, by=NamedBy(newest, state=True)
            )
            assert one.store.read(digest) == table.store.read(digest)
        assert not BlobStore(tmp_path / str(one.number) / "restoring").digests(), "what was put together needs no parts"


async def test_with_one_more_gone_nothing_is_made_up(tmp_path: Path):
    async with sharing(tmp_path) as (table, sharers):
        lose(tmp_path, sharers[: PEERS // 2 + 1])
        for sharer in sharers[PEERS // 2 + 1 :]:
            sharer.peer.store.sweep(sharer.peer.store.digests())
        one = sharers[-1].peer
        with pytest.raises(RemoteError, match=r"2 of .* 3$"):
            await one.exchange.applies.take(table.commits[1])
        assert not one.store.digests()


def lies_about(size: int, blob: bytes, below: bytes) -> tuple[list[services.Share], list[bytes]]:
    """Return shards of another blob, with their bytes; they are tried first, because among equally many the smaller root
    is."""
    code = Code(PEERS, PEERS // 2)
    for fill in range(256):
        parts = list(erasure.stripes([bytes([fill]) * size], size, code))
        bad = [b"".join(stripe[index] for stripe in parts) for index in range(code.shares)]
        lies = shares.make_shares(blob, size, code, [digest_of([each]) for each in bad])
        if lies[0].root < below:
            return lies, bad
    raise AssertionError("no smaller root")


@pytest.mark.parametrize("state", [False, True])
async def test_shares_under_a_lie_are_passed_over(tmp_path: Path, state: bool, monkeypatch: pytest.MonkeyPatch):
    """Check half of a roster that agrees on shards of another blob. For a counted blob they prove nothing; for a state
    they are put together and rejected."""
    async with sharing(tmp_path) as (table, sharers):
        body = table.commits[1].body
        blob = body.state if state else taken(body)[0].contribution.leaves
        size = table.store.size(blob)
        (root,) = {share.root for sharer in sharers if (share := sharer.kept.get(blob)) is not None}
        assert (root == body.data_root) == (not state)
        lies, bad = lies_about(size, blob, root)
        assert len({s.kept.get(blob).index for s in sharers[: PEERS // 2]}) == PEERS // 2  # type: ignore[union-attr]
        for liar, share, raw in zip(sharers[PEERS // 2 :], lies, bad, strict=False):
            liar.kept.store.put([raw])
            liar.kept.add([share])
        tried: list[bytes] = []
        restored = erasure.restored
        monkeypatch.setattr(erasure, "restored", lambda *what: tried.append(blob) or restored(*what))  # type: ignore[func-returns-value]
        for sharer in sharers:
            sharer.peer.store.sweep(sharer.peer.store.digests())
        for sharer in (sharers[0], sharers[-1]):
            await sharer.peer.exchange.downloader.fetch(blob, [], size, by=NamedBy(1, state))
            assert sharer.peer.store.read(blob) == table.store.read(blob)
            assert sharer.peer.store.digests() == {blob}
        assert len(tried) == (6 if state else 4), "twice for what is right; what nothing proves is not fetched"


async def test_what_came_of_a_share_that_broke_off_does_not_stay(tmp_path: Path):
    """Check it: a peer could offer another shard of a state each time, send nearly all of it, and so fill a disk."""
    async with sharing(tmp_path) as (_, (one, liar, *_)):
        assert isinstance(one.peer.shards.restorer, Restorer)
        blob, raw = digest_of([b"a state that nobody has"]), bytes(limits.CHUNK_BYTES + 16)
        lie = shares.make_shares(blob, len(raw), Code(2, 1), [liar.kept.store.put([raw])] * 2)[0]
        liar.kept.add([lie])
        liar.kept.store.path(lie.digest).write_bytes(raw[:-1] + b"x")
        with pytest.raises(RemoteError, match="0 of its shards are available"):
            await one.peer.shards.restorer.fetch(blob, NamedBy(1, state=True), None, one.peer.store, len(raw))
        assert not list((tmp_path / str(one.peer.number) / "restoring").iterdir())


async def test_every_peer_keeps_its_part_and_nobody_sent_it(tmp_path: Path):
    async with sharing(tmp_path) as (table, sharers):
        assert [sharer.peer.service.bytes_sent for sharer in sharers] == [0] * PEERS
        for commit in table.commits[1:]:
            for named in named_by(table.run, commit.body, table.store):
                found = [share for sharer in sharers if (share := sharer.kept.get(named.blob)) is not None]
                assert {share.index for share in found} == set(range(PEERS))
                assert len({share.root for share in found}) == 1
                assert named.state or found[0].root == commit.body.data_root


async def test_a_restart_keeps_its_shares_and_makes_what_is_lost_again(tmp_path: Path):
    async with sharing(tmp_path) as (_, sharers):
        one = sharers[0]
        before = {share.blob for share in one.kept.shares()}
        newest = max(one.kept.shares(), key=lambda share: share.round)
        one.kept.store.path(newest.digest).write_bytes(b"damaged")
        again = ShareStore(one.kept.store.folder)
        assert {share.blob for share in again.shares()} == before
        assert again.get(newest.blob) is None
        one.sharing.shares = again
        one.sharing.update()
        assert again.get(newest.blob) == newest


async def test_a_round_that_is_done_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with sharing(tmp_path, 2) as (_, sharers):
        one, read = sharers[0], list[object]()
        monkeypatch.setattr(one.peer.store, "read", read.append)
        monkeypatch.setattr(one.peer.chain, "commit", read.append)
        one.sharing.update()
        assert read == []


async def test_what_a_look_makes_is_one_batch_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check the batch: six syncs for each shard would leave a disk no time for other work in a round of a thousand
    clusters."""
    waited: list[int] = []
    async with sharing(tmp_path) as (table, sharers):
        one = sharers[0]
        for share in one.kept.shares():
            one.kept.remove(share.blob)
            one.kept.lost.add(share.round)
        monkeypatch.setattr(os, "fsync", waited.append)
        one.sharing.update()
        assert len(one.kept.shares()) == len(list(named_by(table.run, table.commits[1].body, table.store)))
        assert len(waited) == 2, "a file and its folder"


async def test_those_are_asked_first_who_should_have_a_share_and_no_more_than_it_takes(tmp_path: Path):
    async with sharing(tmp_path) as (table, sharers):
        one = sharers[0].peer
        blob = taken(table.commits[1].body)[0].contribution.leaves
        restorer, asked = one.shards.restorer, list[list[str]]()
        assert isinstance(restorer, Restorer)
        holders, code, root = restorer.holders.of(NamedBy(1), blob, None)
        assert code == Code(PEERS, PEERS // 2)
        assert root == table.commits[1].body.data_root
        strangers = [f"stranger {number}" for number in range(2 * ASKED_AT_ONCE)]
        restorer.holders.everybody = lambda: [*strangers, *holders]  # type: ignore[method-assign]
        ask = restorer.ask

        async def noting(blob: bytes, peers: list[str], largest: int, root: bytes) -> list[Answer]:
            asked.append(peers)
            return await ask(blob, peers, largest, root)

        restorer.ask = noting  # type: ignore[method-assign, assignment]
        one.store.remove(blob)
        await one.exchange.downloader.fetch(blob, [], by=NamedBy(1))
        assert asked == [[*holders, *strangers[: ASKED_AT_ONCE - PEERS]]]
        for sharer in sharers[: PEERS // 2 + 1]:
            serve_also(sharer.peer.service, share=lambda blob: None)
        other = Restorer(tmp_path / "other", one.everybody, one.channels, one.chain)
        downloader = Downloader(identity(one.number).peer, one.store, one.everybody, one.channels, shares=other)
        other.holders.everybody, other.ask = restorer.holders.everybody, noting  # type: ignore[method-assign, assignment]
        asked.clear()
        one.store.remove(blob)
        with pytest.raises(RemoteError, match="2 of its shards are available"):
            await downloader.fetch(blob, [], by=NamedBy(1))
        assert [len(each) for each in asked] == [ASKED_AT_ONCE, ASKED_AT_ONCE, PEERS], "else everybody is asked"


async def test_a_budget_of_rounds_holds(tmp_path: Path):
    async with sharing(tmp_path, 2, rounds=1) as (_, sharers):
        for sharer in sharers:
            assert {share.round for share in sharer.kept.shares() if not share.state} == {2}
            assert {share.round for share in sharer.kept.shares() if share.state} == {1}


async def test_who_answers_with_nonsense_is_passed_over(tmp_path: Path):
    async with sharing(tmp_path) as (table, sharers):
        blob = taken(table.commits[1].body)[0].contribution.leaves
        one = sharers[0]
        for sharer in sharers[1:3]:
            serve_also(sharer.peer.service, share=lambda blob: services.Share(blob=blob, shares=6, needed=3, size=1))
        assert isinstance(one.peer.shards.restorer, Restorer)
        answers = await one.peer.shards.restorer.ask(blob, [identity(number).peer for number in range(PEERS)])
        assert {answer.share.index for answer in answers} == {
            share.index for s in (one, *sharers[3:]) if (share := s.kept.get(blob)) is not None
        }
        assert sum(share_bytes(answer.share) for answer in answers) > 0


def sampler(sharer: Sharer, seed: int = 0) -> Sampler:
    peer = sharer.peer
    assert isinstance(peer.shards.restorer, Restorer)
    return Sampler(sharer.sharing.manifest, peer.chain, peer.store, peer.exchange.applies, peer.shards.restorer, Random(seed))


async def test_samples_find_who_withholds(tmp_path: Path):
    """Check a peer that claims its shards and sends none, one that has lost them, and one that is absent."""
    async with sharing(tmp_path) as (_, sharers):
        auditor = sampler(sharers[0])
        drawn = [await auditor.draw() for _ in range(12)]
        assert [sample.why for sample in drawn] == [""] * 12
        assert len({(sample.blob, sample.index) for sample in drawn}) > 6
        names = [identity(number).peer for number in range(PEERS)]
        serve_also(sharers[1].peer.service, shelves=())
        serve_also(sharers[2].peer.service, share=lambda blob: None)
        del sharers[3].peer.everybody.records[names[3]]
        found: dict[str, set[str]] = {name: set() for name in names}
        while any(not whys for whys in found.values()):
            sample = await auditor.draw()
            found[sample.peer].add(sample.why)
        assert [len(found[name]) for name in names] == [1] * PEERS
        assert "does not send it" in found[names[1]].pop()
        assert found[names[2]] == found[names[3]] == {NO_SHARD}
        assert found[names[4]] == found[names[5]] == {""}


async def test_a_share_under_another_root_is_no_answer_though_nobody_else_answers(tmp_path: Path):
    """Check a peer with a shard of another blob, and a proof of that."""
    async with sharing(tmp_path) as (_, sharers):
        auditor, liar = sampler(sharers[0]), sharers[1]
        for sharer in sharers[2:]:
            serve_also(sharer.peer.service, share=lambda blob: None)
        honest = liar.kept.get

        def lie(blob: bytes) -> services.Share | None:
            share = honest(blob)
            if share is None:
                return None
            code = Code(share.shares, share.needed)
            return shares.make_shares(blob, share.size, code, [share.digest] * code.shares)[share.index]

        serve_also(liar.peer.service, share=lie)
        why: dict[str, str] = {}
        while identity(1).peer not in why:
            sample = await auditor.draw()
            why[sample.peer] = sample.why
        assert why.pop(identity(1).peer) == NO_SHARD


def test_what_was_sampled_is_told_with_its_chance(capsys: pytest.CaptureFixture[str]):
    code = Code(6, 3)
    drawn = [Sample(1, bytes(32), code, at % 6, identity(at % 6).peer, "it is away" if at == 5 else "") for at in range(16)]
    said = told(drawn)
    assert said["samples"] == 16
    assert [each["peer"] for each in said["unanswered"]] == [identity(5).peer]
    assert said["chance"] == {"all": shares.chance(code, 16, 1), "half": shares.chance(code, 16, 1, 0.5)}
    show(drawn)
    assert "15 of 16 answered" in capsys.readouterr().out


# Drawn probes


@dataclass
class Drawn:
    """Member that is drawn to probe, and the events that it reports."""

    state: MemberState
    told: list[Sampled] = field(default_factory=list)

    def feed(self, event: Sampled) -> None:
        self.told.append(event)


def drawn_to_ask(table: RealTable, sharers: list[Sharer]) -> tuple[Drawn, Asker, Sharer, str]:
    """Return a member that must probe in the open round, with the probed peer, and its name."""
    [asked] = availability_rules.due(table.run, table.head)
    by_peer = {identity(sharer.peer.number).peer: sharer for sharer in sharers}
    me = sorted(asked.samplers)[0]
    us, restorer = Drawn(member.start(table.run, me, table.head)), by_peer[me].peer.shards.restorer
    assert isinstance(restorer, Restorer)
    return us, Asker(us, restorer, by_peer[me].kept, Random(1)), by_peer[asked.cluster], asked.cluster


async def test_who_is_drawn_to_ask_hears_whether_the_shares_are_there(tmp_path: Path):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        us, asker, target, asked = drawn_to_ask(table, sharers)
        me = us.state.me
        await asker.probe_once()
        assert us.told == [Sampled(asked, True)]
        await asker.probe_once()
        assert len(us.told) == 1, "once is enough in a round"

        us.state = replace(us.state, head=replace(table.head, digest=next_that_asks(table, me, asked)))
        serve_also(target.peer.service, share=lambda blob: None)  # it lost its disk, or never kept them
        await asker.probe_once()
        await asker.probe_once()
        assert us.told[1:] == [Sampled(asked, False)] * 2, "it is asked again"
        serve_also(target.peer.service, share=target.kept.get)
        await asker.probe_once()
        assert us.told[3:] == [Sampled(asked, True)]

        us.state = replace(us.state, head=replace(table.head, digest=next_that_asks(table, me, asked, 1)))
        record = target.peer.everybody.records[asked]
        record.address, before = "", record.address
        await asker.probe_once()
        assert len(us.told) == 4, "who cannot be dialled is asked by nobody"
        record.address = before


async def test_who_passes_on_another_s_share_shows_none(tmp_path: Path):
    """Check a peer without shards that requests proof and chunks from others in turn."""
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        us, asker, target, asked = drawn_to_ask(table, sharers)
        other = next(sharer for sharer in sharers if identity(sharer.peer.number).peer not in (us.state.me, asked))
        serve_also(target.peer.service, share=other.kept.get, shelves=(other.kept,))
        await asker.probe_once()
        assert us.told == [Sampled(asked, False)]


async def test_who_keeps_a_few_shares_is_not_asked_until_it_has_one(tmp_path: Path):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        us, asker, target, asked = drawn_to_ask(table, sharers)
        wanted: list[bytes] = []
        serve_also(target.peer.service, share=lambda blob: wanted.append(blob))  # nothing, yet
        for _ in range(12):
            await asker.probe_once()
        assert us.told == [Sampled(asked, False)] * 12
        assert len(wanted) == 12
        assert len(set(wanted)) == 1, "one is drawn for the round"
        serve_also(target.peer.service, share=target.kept.get)
        await asker.probe_once()
        assert us.told[12:] == [Sampled(asked, True)]


async def test_who_lets_us_wait_keeps_nobody_else_from_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        us, asker, _, _ = drawn_to_ask(table, sharers)
        monkeypatch.setattr(availability_rules, "PART", 2)
        heads = (replace(table.head, digest=digest_of([bytes([number])])) for number in range(99))
        duties = ((head, availability_rules.duties(availability_rules.due(table.run, head), us.state.me)) for head in heads)
        head, (slow, *others) = next((head, asked) for head, asked in duties if len(asked) > 1)
        us.state = replace(us.state, head=head)
        target = next(sharer for sharer in sharers if identity(sharer.peer.number).peer == slow)
        others_were_asked = Event()

        def tell(event: Sampled) -> None:
            us.told.append(event)
            if len(us.told) == len(others):
                others_were_asked.set()

        def late(blob: bytes) -> services.Share | None:
            assert others_were_asked.wait(9)
            return target.kept.get(blob)

        monkeypatch.setattr(us, "feed", tell)
        serve_also(target.peer.service, share=late)
        await asker.probe_once()
        assert sorted(us.told[:-1], key=str) == sorted((Sampled(other, True) for other in others), key=str)
        assert us.told[-1] == Sampled(slow, True)


async def test_nobody_is_asked_for_what_it_need_not_have_had(tmp_path: Path):
    """Check a peer that was not counted together with the others: it may have been absent."""
    async with sharing(tmp_path, 0) as (table, sharers):
        away = next(each.cluster for each in availability_rules.due(table.run, table.head))
        number = next(number for number in range(PEERS) if identity(number).peer == away)
        others = [each for each in range(PEERS) if each != number]
        table.contribute(range(PEERS)).vote(range(PEERS), {number: pb.REASON_UNAVAILABLE})
        assert table.counted() == others
        assert away in table.head.roster
        for sharer in sharers:
            sharer.follow(table, len(table.commits) - 1)
        us = Drawn(member.start(table.run, identity(others[0]).peer, table.head))
        us.state = replace(us.state, head=replace(table.head, digest=next_that_asks(table, us.state.me, away)))
        restorer = sharers[others[0]].peer.shards.restorer
        assert isinstance(restorer, Restorer)
        asker = Asker(us, restorer, sharers[others[0]].kept, Random(1))
        serve_also(sharers[number].peer.service, share=lambda blob: None)
        await asker.probe_once()
        assert us.told == []


async def test_what_a_chain_that_was_given_up_named_takes_nobody_s_room(tmp_path: Path):
    """Check a chain that the owner's appointment cut; it grew again, with other blobs under the same numbers."""
    async with sharing(tmp_path, ROUNDS) as (_, sharers):
        one = sharers[0]
        due, states = ({share.blob for share in one.kept.shares() if share.state is kind} for kind in (False, True))
        live = next(iter(one.kept.shares()))
        for number, round in enumerate((1, ROUNDS, ROUNDS + 1, ROUNDS + 40)):
            dead = services.Share()
            dead.CopyFrom(live)
            dead.blob, dead.round, dead.state = digest_of([b"%d" % number]), round, round > ROUNDS + 1
            dead.root = digest_of([b"another root"])
            one.kept.add([dead])
        one.sharing.update()
        unknown = {share.blob for share in one.kept.shares() if share.round > ROUNDS}
        assert len(unknown) == 2, "the chain may only be behind: chain.db was damaged, and is read from others again"
        assert {share.blob for share in one.kept.shares()} - unknown == due | states
        restorer = one.peer.shards.restorer
        assert isinstance(restorer, Restorer)
        asked = next(share for share in one.kept.shares() if not share.state), identity(0).peer, identity(1).peer
        assert restorer.holders.in_cluster(*asked)[0]
        asked[0].root = dead.root
        assert restorer.holders.in_cluster(*asked)[0] == {}


async def test_who_is_asked_was_there_has_had_time_and_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "SETTLED", 3)
    async with sharing(tmp_path, 0) as (table, _):
        cluster = max(table.head.roster)
        ours = [services.Share(blob=bytes([n, s]), round=n, state=bool(s)) for n in range(1, 9) for s in range(2)]
        head = replace(table.head, round=9)

        def rounds(since: int, joined: int) -> list[int]:
            seat = replace(head.roster[cluster], joined=joined)
            found = askable(replace(head, roster={**head.roster, cluster: seat}), cluster, since, ours)
            assert not any(share.state for share in found), "no commit has a root of its shares"
            return sorted(share.round for share in found)

        assert rounds(1, 0) == [1, 2, 3, 4, 5, 6]
        assert rounds(4, 0) == rounds(1, 4) == [4, 5, 6]
        assert rounds(9, 0) == []


async def test_the_chain_says_how_much_room_a_round_s_shares_take(tmp_path: Path):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        restorer = sharers[0].peer.shards.restorer
        assert isinstance(restorer, Restorer)
        took = 0
        for number in range(1, table.head.round):
            sizes = [item.contribution.size for item in taken(table.commits[number].body)]
            bound = shares.most_shared(table.run, table.head.roster, sizes)
            for sharer in sharers:
                here = [share for share in sharer.kept.shares() if share.round == number and not share.state]
                assert 0.6 * bound < sum(share_bytes(share) for share in here) <= bound
            took += bound
        assert restorer.holders.kept_since(table.head.round) == 1
        for most, since in ((2 * took, 1), (2 * took - 2, 2), (0, table.head.round)):
            small = Availability.model_construct(rounds=9, megabytes=most / 1e6, needed_share=0.5)
            sharers[0].peer.chain.manifest.__dict__["availability"] = small
            assert restorer.holders.kept_since(table.head.round) == since


def next_that_asks(table: RealTable, me: str, cluster: str, skip: int = 0) -> bytes:
    """Return the digest of a head with which `me` must probe `cluster`."""
    for number in range(10_000):
        head = replace(table.head, digest=digest_of([number.to_bytes(4, "big")]))
        if cluster in availability_rules.duties(availability_rules.due(table.run, head), me):
            skip -= 1
            if skip < 0:
                return head.digest
    raise AssertionError("nobody is ever asked")


async def test_nobody_is_asked_for_shares_of_a_round_that_just_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with sharing(tmp_path, ROUNDS) as (table, sharers):
        one = sharers[0]
        assert isinstance(one.peer.shards.restorer, Restorer)
        parts = table.run, one.peer.chain, one.peer.store, one.peer.exchange.applies, one.peer.shards.restorer
        monkeypatch.setattr(probes, "SETTLED", 3)
        sampler = Sampler(*parts, Random(1))
        assert {(await sampler.draw()).round for _ in range(20)} == {1}, "of three"
        monkeypatch.setattr(probes, "SETTLED", 4)
        with pytest.raises(ConfigError, match="no shards"):
            Sampler(*parts, Random(1))
