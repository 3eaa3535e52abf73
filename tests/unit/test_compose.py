"""Tests of a commit, field by field: counted, seated and resting clusters, and the run's state; and the names of wrong
fields."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dilocox.protocol import limits
from dilocox.protocol.checks import merit_rules
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.chain import Closing
from dilocox.protocol.consensus.head import Cluster, Head, HostRange, Rest
from dilocox.protocol.consensus.pool import Slot
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, SETTLEMENT, Table, digest, identity, manifest
from tests.sentences import Message

AT = Closing(1_700_001_000_000, open_ms=40, collect_ms=30, vote_ms=20)
AHEAD = 4 * 12 * 4
"""Samples leased ahead: four phases of at most 12 steps of 4."""
A, B = sorted([digest("a"), digest("b")])
"""Two states."""


def peer(number: int) -> str:
    return identity(number).peer


def peers(*numbers: int) -> list[str]:
    return sorted(peer(number) for number in numbers)


def table_of(clusters: int = 3, trained: int = 0, **sections: dict) -> Table:
    rounds = {"start_clusters": clusters, "count": 20, **sections.pop("rounds", {})}
    return Table(manifest(rounds=rounds, **sections)).genesis(range(clusters)).train(trained, range(clusters))


def compose(table: Table, head: Head | None = None, **changes: Any) -> pb.Commit:
    """Compose the commit of the gathered statements, as if the round closed now."""
    return chain.compose(table.run, head or table.head, replace(table.state.gathered, **changes), AT)


def absent(*numbers: int) -> tuple[pb.Exclusion, ...]:
    """Return the coordinator's notes on absent peers."""
    return tuple(pb.Exclusion(peer=peer(number), reason=pb.REASON_ABSENT) for number in numbers)


def slots(*statements: Statement) -> dict[str, Slot]:
    return {statement.peer: (statement,) for statement in statements}


def seated(commit: pb.Commit) -> set[str]:
    return {member.cluster for member in commit.roster}


# A commit, whole.


def test_the_first_commit_holds_this_and_nothing_else():
    table = Table(manifest(settlement=SETTLEMENT))
    claims = [table.claim(number, account=b"a" * 20 if number == 1 else b"") for number in range(3)]
    for claim in claims:
        table.submit(claim)
    ordered = sorted(claims, key=lambda claim: claim.digest)
    keys = sorted(claim.envelope.key for claim in claims)
    assert table.commits[0].body == pb.Commit(
        round=0,
        closed_at_ms=table.moment.wall_ms,
        signers=keys,
        claims=[
            pb.Signed(signer=keys.index(c.envelope.key), body=c.envelope.body, signature=c.envelope.signature) for c in ordered
        ],
        roster=[
            pb.Member(
                cluster=name,
                joined=1,
                lease=[pb.Span(start=AHEAD * place, end=AHEAD * (place + 1))],
                account=b"a" * 20 if name == peer(1) else b"",
                standing=pb.Standing(earned=64),
            )
            for place, name in enumerate(peers(0, 1, 2))
        ],
        merit_root=merit_rules.root({}),
        state=claims[0].body.state,
        data_cursor=3 * AHEAD,
        rank_or_k=8,
        inner_steps=4,
    )


def test_a_commit_of_a_round_holds_this_and_nothing_else():
    table = table_of()
    contributions = [
        table.contribution(number, loss=loss, norm=norm) for number, loss, norm in ((0, 1, 130), (1, 2, 131), (2, 6, 151))
    ]
    for contribution in contributions:
        table.submit(contribution)
    receipts = [table.receipt(number) for number in range(3)]
    for receipt in receipts[:2]:
        table.submit(receipt)
    gathered = replace(
        table.state.gathered,
        receipts={**table.state.gathered.receipts, peer(2): (receipts[2],)},
        refusals=(pb.Exclusion(peer="somebody", reason=pb.REASON_OVERSIZE, detail="no"),),
    )
    keys = sorted(contribution.envelope.key for contribution in contributions)

    def signed(statements: list[Statement]) -> list[pb.Signed]:
        envelopes = [statement.envelope for statement in sorted(statements, key=lambda statement: statement.digest)]
        return [pb.Signed(signer=keys.index(e.key), body=e.body, signature=e.signature) for e in envelopes]

    order = sorted(contributions, key=lambda contribution: contribution.digest)
    assert chain.compose(table.run, table.head, gathered, AT) == pb.Commit(
        round=1,
        previous=table.head.digest,
        closed_at_ms=AT.at_ms,
        open_ms=40,
        collect_ms=30,
        vote_ms=20,
        ballot=table.ballots[0].envelope,
        signers=keys,
        contributions=signed(contributions),
        receipts=signed(receipts),
        refusals=gathered.refusals,
        roster=[
            pb.Member(
                cluster=name,
                joined=1,
                samples_counted=16,
                lease=[
                    pb.Span(start=AHEAD * place + 16, end=AHEAD * (place + 1)),
                    pb.Span(start=3 * AHEAD + 16 * place, end=3 * AHEAD + 16 * (place + 1)),
                ],
                standing=pb.Standing(earned=64, counted=1),
            )
            for place, name in enumerate(peers(0, 1, 2))
        ],
        counted=[
            pb.Counted(contribution=order.index(c), weight=c.body.tokens, clip=12 if c.peer == peer(2) else 0, standing=64)
            for c in sorted(contributions, key=lambda c: c.peer)
        ],
        state=table.state_root(),
        norm=131,
        loss=3.0,
        data_cursor=3 * AHEAD + 48,
        rank_or_k=8,
        inner_steps=4,
        trained=1,
        collect_history=[30],
        vote_history=[20],
    )


def test_the_last_commit_excludes_nobody_and_says_the_state_and_its_loss():
    table = table_of(rounds={"count": 1}, trained=1)
    reports = [
        table.report(0, evaluated=True, evaluation_loss=1.0),
        table.report(1, evaluation_loss=0.0),
        table.report(2, evaluated=True, evaluation_loss=4.0),
    ]
    for report in reports:
        table.submit(report)
    body = table.commits[-1].body
    assert body.closing
    assert (body.evaluated, body.evaluation_loss) == (True, 1.0)
    assert (list(body.excluded), list(body.counted), body.trained) == ([], [], 1)
    assert (body.state, list(body.built_by)) == (table.state_root(), peers(0, 1, 2))
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_a_loss_that_nobody_measured_or_that_is_told_twice_is_not_said():
    table = table_of()
    table.submit(table.report(0))
    for loss in (1.0, 2.0):
        table.submit(table.report(1, evaluated=True, evaluation_loss=loss))
    commit = compose(table)
    assert len(commit.reports) == 3
    assert (commit.evaluated, commit.evaluation_loss) == (False, 0.0)


@pytest.mark.parametrize("first", [False, True])
def test_who_reports_twice_says_the_loss_of_its_replay_in_whatever_order_the_two_came(first: bool):
    """Check one loss of a member with two reports; otherwise no other peer could compose the same commit, and the run
    would end."""
    table = table_of()
    for replayed in (first, not first):
        table.submit(table.report(1, replayed=replayed, evaluated=True, evaluation_loss=2.0 + replayed))
    assert (compose(table).evaluated, compose(table).evaluation_loss) == (True, 3.0)
    table.train(1).verify()


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_a_median_loss_has_the_same_bits_in_whatever_order_the_losses_came(numbers: tuple[int, int]):
    """Check 0 and -0, which are equal, and would be two different commits."""
    table = table_of()
    for number in numbers:
        table.submit(table.report(number, evaluated=True, evaluation_loss=-0.0 if number else 0.0))
    table.train(1).verify()


def test_what_was_not_voted_on_stands_in_no_commit():
    table = table_of().contribute()
    table.vote([0])
    assert table.state.gathered.receipts
    commit = compose(table, ballot=None)
    assert not commit.HasField("ballot")
    assert (list(commit.contributions), list(commit.receipts), list(commit.signers)) == ([], [], [])


def test_a_commit_that_counts_nobody_remembers_who_knows_the_state():
    table = table_of(trained=2)
    commit = compose(table)
    assert (list(commit.counted), list(commit.built_by), commit.trained) == ([], peers(0, 1, 2), 2)
    assert [item.reason for item in commit.excluded] == [pb.REASON_LATE] * 3
    assert list(table.commits[-1].body.built_by) == [], "who counts is named already"


def test_rank_of_the_next_round_follows_what_was_counted():
    table = table_of(compression={"rank": 8, "adapt": "effective-rank"})
    assert table.head.rank_or_k == 8
    for rank, kept in ((16.5, 10), (22.5, 13), (1.0, 10)):
        for number in range(3):
            table.submit(table.contribution(number, effective_rank=rank))
        table.vote()
        assert table.head.rank_or_k == kept
    table.contribute().vote(reject=dict.fromkeys(range(3), pb.REASON_UNAVAILABLE))
    assert table.head.rank_or_k == 10


# Clusters that stay.


def test_who_is_counted_again_has_missed_nothing():
    table = table_of()
    table.contribute([0, 1]).absent(2)
    table.vote([0, 1])
    assert {name: cluster.missed for name, cluster in table.head.roster.items()} == {peer(0): 0, peer(1): 0, peer(2): 1}
    table.present(2)
    table.train(1)
    assert {cluster.missed for cluster in table.head.roster.values()} == {0}


def test_who_misses_two_commits_rests_for_two():
    table = table_of()
    table.absent(2)
    table.train(1, [0, 1])
    assert table.head.resting == {}
    table.train(1, [0, 1])
    assert list(table.commits[-1].body.resting) == [pb.Rest(cluster=peer(2), until=5, removals=1)]
    assert table.head.resting == {peer(2): Rest(5, 1)}
    table.present(2)
    for round, roster in ((3, [0, 1]), (4, [0, 1]), (5, [0, 1, 2])):
        assert table.head.round == round
        table.submit(table.claim(2))
        table.train(1, [0, 1])
        assert table.roster() == roster
    assert table.head.roster[peer(2)].joined == 6
    assert table.train(1).head.resting == {peer(2): Rest(5, 1)}
    assert table.train(1).head.resting == {}, "forgotten as long after its end as it lasted"
    table.verify()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, Rest(9, 1)),
        (Rest(4, 1), Rest(9, 1)),  # forgotten
        (Rest(5, 1), Rest(11, 2)),
        (Rest(4, 2), Rest(15, 3)),
        (Rest(2, 5), Rest(71, 6)),
        (Rest(2, 6), Rest(71, 7)),
        (Rest(-58, 6), Rest(9, 1)),
        (Rest(-57, 8), Rest(71, 9)),
    ],
)
def test_who_is_removed_again_rests_longer(before: Rest | None, after: Rest):
    """Check the rest in round 6; a rest that ended long ago is forgotten."""
    table = table_of(trained=5)
    late = replace(table.head.roster[peer(2)], missed=1)
    resting = {} if before is None else {peer(2): before}
    head = replace(table.head, roster={**table.head.roster, peer(2): late}, resting=resting)
    table.contribute([0, 1]).absent(2)
    commit = compose(table, head, receipts=slots(table.receipt(0), table.receipt(1)))
    assert {item.cluster: Rest(item.until, item.removals) for item in commit.resting} == {peer(2): after}
    assert seated(commit) == set(peers(0, 1))


def test_no_more_rests_are_remembered_than_a_roster_has_seats(monkeypatch: pytest.MonkeyPatch):
    table = table_of(trained=1)
    monkeypatch.setattr(limits, "CLUSTERS", 2)
    resting = {"d": Rest(9, 1), "c": Rest(8, 1), "a": Rest(8, 2), "b": Rest(7, 1)}
    commit = compose(table, replace(table.head, resting=resting))
    assert [(item.cluster, item.until) for item in commit.resting] == [("a", 8), ("d", 9)]


def test_who_claims_again_keeps_its_seat_and_who_changed_its_boxes_too():
    table = table_of()
    table.contribute([0, 1]).absent(2)
    table.vote([0, 1])
    lease = table.head.ledger.leases[peer(2)]
    table.present(2)
    layout = table.layout(2, [(2, 0, 1, 0), (5, 1, 1, 0), (6, 1, 1, 1)])
    for statement in (layout, *(table.claim(number, cluster=layout.digest) for number in (2, 5, 6))):
        table.submit(statement)
    table.contribute([0, 1]).submit(table.contribution(2))
    table.vote([0, 1, 2])
    hosts = (HostRange(peer(2), 0, 1), HostRange(peer(5), 1, 1), HostRange(peer(6), 1, 1, copy=1))
    assert table.head.roster[peer(2)] == Cluster(peer(2), hosts, joined=1, missed=0)
    assert table.head.ledger.leases[peer(2)].counted == lease.counted + 16
    member = next(member for member in table.commits[-1].body.roster if member.cluster == peer(2))
    assert list(member.hosts) == [
        pb.Host(peer=peer(2), stage_count=1),
        pb.Host(peer=peer(5), first_stage=1, stage_count=1),
        pb.Host(peer=peer(6), first_stage=1, stage_count=1, copy=1),
    ]


def test_a_cluster_is_seated_with_all_stretches_of_its_boxes():
    table = Table(manifest(model={"stages": 4})).genesis().train(1)
    layout = table.layout(5, [(5, 0, 1, 0), (6, 1, 1, 0), (5, 2, 1, 0), (6, 3, 1, 0)])
    for statement in (layout, *(table.claim(number, cluster=layout.digest) for number in (5, 6))):
        table.submit(statement)
    table.train(1)
    seated = table.head.roster[peer(5)]
    assert seated.peers == (peer(5), peer(6)), "each once"
    assert [seated.stages_of(name) for name in seated.peers] == [[0, 2], [1, 3]]
    assert seated.hosts_of(2) == [peer(5)]


def test_who_claims_again_has_missed_what_it_missed():
    table = table_of()
    table.contribute([0, 1]).absent(2)
    table.present(2)
    table.submit(table.claim(2))
    table.vote([0, 1])
    assert table.head.roster[peer(2)] == Cluster(peer(2), (HostRange(peer(2), 0, 2),), joined=1, missed=1)


def test_a_run_that_asks_for_no_evidence_holds_none():
    table = table_of()
    table.attest(0)
    table.train(1)
    assert [list(member.hosts) for member in table.commits[-1].body.roster] == [[], [], []]


def test_who_is_taken_off_the_roster_is_not_seated_by_the_same_commit():
    table = table_of()
    table.absent(2)
    table.train(1, [0, 1])
    table.contribute([0, 1])
    table.present(2)
    table.submit(table.claim(2))
    table.vote([0, 1])
    assert table.roster() == [0, 1]
    assert table.head.resting == {peer(2): Rest(5, 1)}


# Clusters that get a seat, and their state.


def test_nobody_opens_a_run_of_nobody():
    commit = compose(Table(manifest()))
    assert (list(commit.roster), commit.state) == ([], b"")


@pytest.mark.parametrize(
    ("states", "group"),
    [
        ({}, []),
        ({"c": B}, ["c"]),
        ({"a": A, "b": B, "c": B}, ["b", "c"]),
        ({"d": A, "b": B, "c": A, "a": B}, ["a", "b"]),
        ({"d": B, "b": A, "c": B, "a": B, "e": A, "f": A}, ["a", "c", "d"]),
    ],
)
def test_a_run_begins_with_the_largest_group_of_one_state(states: dict[str, bytes], group: list[str]):
    complete = {name: (Cluster(name, (), 1), state) for name, state in states.items()}
    assert chain.genesis_group(manifest(), complete) == group


def test_a_run_of_one_begins_with_one():
    table = Table(manifest(rounds={"min_clusters": 1, "start_clusters": 1}))
    claim = table.claim(3)
    table.submit(claim)
    assert (table.roster(), table.commits[0].body.state) == ([3], claim.body.state)


@pytest.mark.parametrize(("clusters", "min_clusters", "places"), [(9, 1, 1), (16, 1, 2), (9, 3, 3)])
def test_an_open_run_seats_so_many_newcomers_by_lot(clusters: int, min_clusters: int, places: int):
    table = table_of(clusters, rounds={"min_clusters": min_clusters})
    newcomers = range(30, 38)
    for number in newcomers:
        table.submit(table.claim(number))
    lots = sorted(newcomers, key=lambda number: sha256(sha256(table.head.digest), peer(number).encode()))
    assert seated(compose(table)) == set(peers(*range(clusters), *lots[:places]))


def test_who_chooses_its_name_for_the_head_draws_no_better_lot():
    """Reproduce a fault: names cost nothing, so an unknown peer that tried a few thousand took every seat for newcomers,
    in every round."""
    wins = []
    for offset in range(30, 630, 100):
        table, many = table_of(9, rounds={"min_clusters": 1}), range(offset, offset + 100)
        best = min(many, key=lambda number: sha256(sha256(table.head.digest), peer(number).encode()))
        newcomers = [best, *[number for number in many if number != best][:7]]
        for number in newcomers:
            table.submit(table.claim(number))
        assert peer(best) in seated(compose(table)), "without votes a commit holds nothing that unknown peers do not see"
        head = table.head
        table.contribute(range(9)).vote(range(9))
        commit = table.commits[-1].body
        votes = [statement for statement in chain.envelopes(commit) if statement.kind == pb.KIND_RECEIPT]
        lot = sha256(head.digest, *(sha256(sha256(vote.key, vote.body), vote.signature) for vote in votes))
        first = min(newcomers, key=lambda number: sha256(lot, peer(number).encode()))
        assert (len(votes), seated(commit)) == (9, set(peers(*range(9), first)))
        wins.append(first == best)
        table.verify()
    assert not all(wins)


def test_a_roster_has_so_many_seats(monkeypatch: pytest.MonkeyPatch):
    allow = [peer(number) for number in range(8)]
    table = table_of(admission={"policy": "allow-list", "allow": allow})
    for number in range(3, 8):
        table.submit(table.claim(number))
    assert seated(compose(table)) == set(allow)
    monkeypatch.setattr(limits, "CLUSTERS", 5)
    first = sorted(allow[3:])[:2]
    assert seated(compose(table)) == {*allow[:3], *first}


def test_who_is_not_heard_takes_no_seat():
    table = table_of()
    for number in (5, 6):
        table.submit(table.claim(number))
    assert seated(compose(table, refusals=absent(5))) == set(peers(0, 1, 2, 6))


def test_only_who_holds_valid_evidence_takes_a_seat():
    table = Table(manifest(attestation={"kinds": ["simulated"], "lifetime_seconds": 100}))
    attestations = [table.attest(number) for number in range(4)]
    table.genesis()
    fifth = table.attest(5)
    layout = table.layout(5, [(5, 0, 1, 0), (3, 1, 1, 0)])
    table.submit(layout)
    for number in (3, 5):
        table.submit(table.claim(number, cluster=layout.digest))
    at = Closing(table.moment.wall_ms)
    attested = {peer(3): attestations[3], peer(5): fifth}
    whole = replace(table.state.gathered, attested=attested)
    for gathered, expected in ((whole, peers(0, 1, 2, 5)), (replace(whole, attested={peer(5): fifth}), peers(0, 1, 2))):
        commit = chain.compose(table.run, table.head, gathered, at)
        assert seated(commit) == set(expected)
        assert list(commit.attested) == [gathered.attested[name] for name in sorted(gathered.attested)]
    commit = chain.compose(table.run, table.head, whole, at)
    first = next(member for member in commit.roster if member.cluster == peer(0))
    assert list(first.hosts) == [pb.Host(peer=peer(0), stage_count=2, attestation=attestations[0])]
    later = Closing(attestations[0].valid_until_ms)
    assert seated(chain.compose(table.run, table.head, whole, later)) == set()


Words = Callable[[Table], dict[str, Any]]


def reports(*said: tuple[int, bytes]) -> Words:
    return lambda table: {"reports": {(peer(n), False): (table.report(n, state=state),) for n, state in said}}


def claims(*said: tuple[int, bytes]) -> Words:
    return lambda table: {"claims": slots(*(table.claim(n, state=state) for n, state in said))}


def both(one: Words, other: Words) -> Words:
    return lambda table: {**one(table), **other(table)}


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (reports(), b""),
        (reports((0, A), (1, B), (2, B), (3, B), (4, B)), B),  # two thirds: no guess
        (reports((0, B)), b""),  # no other cluster continues with them
        (reports((1, B), (2, B)), b""),
        (both(reports((0, B)), claims((8, B))), B),
        (both(reports((0, A)), claims((8, B))), b""),  # either denies the other
        (both(reports((1, B), (2, B), (3, A)), claims((8, A), (9, B))), B),  # number 0 denies nothing
        (both(reports((1, A), (2, A), (3, B)), claims((8, A), (9, B))), A),
        (both(reports((1, A), (2, B)), claims((8, A), (9, B))), A),  # of equals the smaller
        (both(reports((1, B), (2, A)), claims((8, B))), B),  # among the states that so many continue with
        (both(reports((7, B)), claims((9, B))), B),  # on the roster, and did not make the state
        (both(reports((7, B), (1, A)), claims((8, A), (9, B))), A),
        (claims((8, B)), B),  # rests
        (claims((9, B)), b""),  # an unknown peer
        (claims((8, B), (9, A)), B),
        (claims((8, B), (0, A)), b""),
    ],
)
def test_the_state_of_a_run_that_would_stand_still(words: Words, state: bytes):
    """Check round 2 of six clusters and a newcomer, of which one is live; number 8 rests."""
    table = table_of(6)
    table.submit(table.claim(7))
    table.train(1, range(6))
    head = replace(table.head, resting={peer(8): Rest(99, 1)})
    said = words(table)
    commit = compose(table, head, refusals=absent(1, 2, 3, 4, 5, 7), **said)
    assert commit.state == state
    claimants = {name for name, slot in said.get("claims", {}).items() if state and slot[0].body.state == state}
    assert seated(commit) == set(head.roster) | claimants


def test_where_the_owner_named_everybody_who_claims_may_say_the_state():
    table = table_of(admission={"policy": "allow-list", "allow": [peer(number) for number in range(9)]}, trained=1)
    said = claims((7, B), (8, B))(table)
    commit = compose(table, refusals=absent(0, 1, 2), **said)
    assert (commit.state, seated(commit)) == (B, set(peers(0, 1, 2, 7, 8)))
    commit = compose(table, refusals=absent(2), **said)
    assert (commit.state, seated(commit)) == (b"", set(peers(0, 1, 2))), (
        "enough are heard: the next round's reports will say it"
    )


def test_who_rests_is_not_seated_by_a_commit_that_counts_somebody():
    table = table_of().contribute()
    receipts = slots(*(table.receipt(number) for number in range(3)))
    table.submit(table.claim(8))
    head = replace(table.head, resting={peer(8): Rest(2, 1)})
    notes = absent(0, 1)
    commit = compose(table, head, receipts=receipts, refusals=notes)
    assert len(commit.counted) == 3
    assert seated(commit) == set(peers(0, 1, 2))
    assert seated(compose(table, head, ballot=None, refusals=notes)) == set(peers(0, 1, 2, 8)), "but by one that wakes the run"
    assert seated(compose(table, head, ballot=None)) == set(peers(0, 1, 2)), "which runs"
    rested = replace(table.head, resting={peer(8): Rest(1, 1)})
    assert seated(compose(table, rested, receipts=receipts)) == set(peers(0, 1, 2, 8))


def test_those_who_leave_are_not_heard():
    table = table_of()
    for number in (1, 2):
        table.submit(table.leave(number))
    commit = compose(table, claims=slots(table.claim(8)))
    assert seated(commit) == set(peers(0, 8))


# Samples that are settled, and the relays of payloads.


def test_what_a_commit_takes_in_the_order_of_the_mean():
    table = table_of()
    contributions = {number: table.contribution(number, norm=140 + 9 * (number == 2)) for number in range(3)}
    for contribution in contributions.values():
        table.submit(contribution)
    table.vote()
    found = chain.taken(table.commits[-1].body)
    expected = sorted(contributions.values(), key=lambda contribution: contribution.peer)
    assert found == [
        chain.CountedPayload(c.peer, c.body.tokens, int(c.peer == peer(2)), 64, c.body, c.digest) for c in expected
    ]
    assert [item.factor == 1.0 for item in found] == [item.cluster != peer(2) for item in found]


def test_a_clip_counts_by_its_factor():
    taken = chain.CountedPayload("", 1, 8, 64, pb.Contribution(), b"")
    assert taken.factor == 0.5


def test_payloads_lie_with_their_author_its_holders_and_whoever_accepted_them():
    table = table_of(9)
    for number in range(9):
        table.submit(table.contribution(number, spoil=lambda body: body.holders.append(peer(20)) if body.loss == 2.0 else None))
    receipts = [table.receipt(number, {8: pb.REASON_UNAVAILABLE} if number < 3 else {}) for number in range(9)]
    for receipt in receipts:
        table.submit(receipt)
    everyone = peers(*range(9))
    assert chain.holders(table.commits[-1].body) == {
        name: [
            name,
            peer(20),
            *(voter for voter in everyone if voter != name and (name != peer(8) or voter not in peers(0, 1, 2))),
        ]
        for name in everyone
    }


def test_payloads_of_one_who_left_before_it_voted_lie_with_it_and_its_holders():
    table = table_of(1, rounds={"min_clusters": 1})
    table.submit(table.contribution(0, spoil=lambda body: body.holders.append(peer(20))))
    table.submit(table.leave(0))
    body = table.commits[-1].body
    assert list(body.receipts) == []
    assert chain.holders(body) == {peer(0): [peer(0), peer(20)]}


# Errors of an invalid commit.


def refusal(run: Manifest, head: Head, commit: pb.Commit) -> tuple[pb.Reason, str]:
    with pytest.raises(RemoteError) as caught:
        chain.extend(run, head, seal(COORDINATOR, pb.KIND_COMMIT, run.run_id, commit).envelope)
    return caught.value.reason, caught.value.detail


def changed(commit: pb.Commit, change: Callable[[pb.Commit], object]) -> pb.Commit:
    body = pb.Commit.FromString(commit.SerializeToString())
    change(body)
    return body


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (lambda b: setattr(b, "round", 7), pb.REASON_WRONG_HEAD, Message("protocol/consensus/chain.py", 7, 1)),
        (lambda b: setattr(b, "previous", digest("x")), pb.REASON_WRONG_HEAD, Message("protocol/consensus/chain.py", 2, 1)),
        (
            lambda b: setattr(b, "closed_at_ms", 5),
            pb.REASON_MALFORMED,
            Message("protocol/consensus/chain.py", 2, "closed before"),
        ),
        (
            lambda b: b.MergeFrom(pb.Commit(trained=7, norm=1)),
            pb.REASON_MALFORMED,
            Message("protocol/consensus/chain.py", 2, ": norm, trained"),
        ),
        (
            lambda b: b.receipts.append(b.receipts[0]),
            pb.REASON_MALFORMED,
            Message("protocol/consensus/chain.py", 2, "receipt", "already"),
        ),
        (
            lambda b: setattr(b.reports[0], "signer", 9),
            pb.REASON_MALFORMED,
            Message("protocol/wire/messages.py", 9, 3),
        ),
    ],
)
def test_a_commit_that_does_not_follow_is_named(change: Callable[[pb.Commit], object], reason: pb.Reason, detail: str):
    table = table_of(trained=1)
    head = table.head
    table.submit(table.report(0))
    table.train(1)
    assert refusal(table.run, head, changed(table.commits[-1].body, change)) == (reason, detail)


def test_nothing_follows_the_last_commit():
    table = table_of(trained=1, rounds={"count": 1})
    for number in range(3):
        table.submit(table.report(number))
    after = pb.Commit(round=table.head.round, previous=table.head.digest, closed_at_ms=table.head.closed_at_ms)
    assert refusal(table.run, table.head, after) == (pb.REASON_WRONG_HEAD, Message("protocol/consensus/chain.py", 3, 2))


def test_a_commit_of_somebody_else_is_named():
    table = table_of(trained=1)
    head = chain.extend(table.run, Table(table.run).head, table.commits[0].envelope)[0]
    forged = seal(identity(1), pb.KIND_COMMIT, table.run.run_id, table.commits[1].body)
    with pytest.raises(RemoteError) as caught:
        chain.extend(table.run, head, forged.envelope)
    why = Message("protocol/consensus/chain.py", 1, peer(1))
    assert (caught.value.reason, caught.value.detail) == (pb.REASON_BAD_SIGNATURE, why)


def test_a_statement_that_may_not_stand_in_a_commit_is_named():
    table = table_of(trained=1)
    stale = table.report(0, round=1)
    commit = compose(table, reports={(peer(0), False): (stale,)})
    detail = Message("protocol/consensus/chain.py", 2, "state_report", 1, 2)
    assert refusal(table.run, table.head, commit) == (pb.REASON_STALE_ROUND, detail)


def test_a_commit_follows_and_says_where_the_run_stands():
    table = table_of(trained=1)
    head = table.head
    table.train(1)
    after, commit = chain.extend(table.run, head, table.commits[-1].envelope.SerializeToString())
    assert after == table.head
    assert commit == table.commits[-1]
    kinds = [envelope.kind for envelope in chain.envelopes(commit.body)]
    assert kinds == [pb.KIND_CONTRIBUTION] * 3 + [pb.KIND_BALLOT] + [pb.KIND_RECEIPT] * 3
