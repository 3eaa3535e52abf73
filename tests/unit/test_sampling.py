"""Tests of availability probes: their draw, their part in votes, and the effect on a cluster without shards."""

from dataclasses import replace

from dilocox.protocol.checks import availability_rules
from dilocox.protocol.checks.availability import Sampled, lacking_of
from dilocox.protocol.consensus import chain, reputation
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.reputation import Record
from dilocox.protocol.consensus.rules import Judgement, Outcome
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import seal
from tests.helpers import Table, digest, identity, manifest

ROUNDS = 32


def run_of(clusters: int = 12) -> Manifest:
    return manifest(
        standing={"rounds": ROUNDS},
        availability={"rounds": 256},
        rounds={"count": 100, "start_clusters": clusters},
    )


def name(number: int) -> str:
    return identity(number).peer


def head_of(clusters: int = 12) -> Head:
    return Table(run_of(clusters=clusters)).genesis(range(clusters)).head


def receipts(said: dict[str, list[int]]) -> dict[str, pb.Receipt]:
    return {voter: pb.Receipt(lacking=places) for voter, places in said.items()}


def test_in_each_round_some_are_asked_by_as_many_others_as_the_run_says():
    run, head = run_of(clusters=24), head_of(24)
    asked: set[str] = set()
    for round in range(60):
        drawn = availability_rules.due(run, replace(head, digest=digest("head", round)))
        assert len(drawn) == 24 // availability_rules.PART
        for each in drawn:
            assert each.cluster not in each.samplers
            assert sum(each.samplers.values()) == 5
            asked.add(each.cluster)
            assert all(each.cluster in availability_rules.duties(drawn, sampler) for sampler in each.samplers)
    assert asked == set(head.roster), "everybody's turn comes"


def test_nobody_is_asked_where_the_run_asks_for_none_or_there_is_nobody_else():
    assert availability_rules.due(manifest(standing={"rounds": ROUNDS}), head_of()) == ()
    assert availability_rules.due(manifest(), head_of()) == ()
    alone = head_of()
    assert availability_rules.due(run_of(), replace(alone, roster=dict(list(alone.roster.items())[:1]))) == ()


def test_where_few_are_there_all_others_ask():
    head = head_of()
    few = replace(head, roster=dict(sorted(head.roster.items())[:3]))
    [only] = availability_rules.due(run_of(), few)
    assert only.samplers.keys() == few.roster.keys() - {only.cluster}


def test_two_thirds_of_what_was_drawn_find_a_cluster_without_and_never_one_alone():
    [asked] = availability_rules.due(run_of(), head_of())
    voters, here = sorted(asked.samplers, key=lambda voter: (-asked.samplers[voter], voter)), {asked.cluster}
    for count in range(len(voters) + 1):
        against = voters[:count]
        enough = count > 1 and 3 * sum(asked.samplers[voter] for voter in against) >= 2 * sum(asked.samplers.values())
        said = receipts({voter: [0] for voter in against})
        assert (asked.cluster in availability_rules.lacking([asked], said, here)) is enough
    everybody = receipts({voter: [0] for voter in voters})
    assert not availability_rules.lacking([asked], everybody, set()), "who went is absent and no more"
    strangers = receipts({name(number): [0] for number in range(50, 60)})
    assert not availability_rules.lacking([asked], strangers, here), "only those who were drawn"
    heavy = availability_rules.Sampled(asked.cluster, {"a": 5})
    assert not availability_rules.lacking([heavy], receipts({"a": [0]}), here)


def test_a_receipt_tells_of_the_samples_that_were_its_voter_s():
    drawn = availability_rules.due(run_of(clusters=24), head_of(24))
    first = drawn[0]
    voter = next(iter(first.samplers))
    assert availability_rules.told(drawn, voter, {first.cluster}) == [0]
    assert availability_rules.told(drawn, voter, set()) == []
    assert not availability_rules.finding_fault(drawn, voter, [0])
    outsider = next(peer for peer in head_of(24).roster if peer not in first.samplers)
    assert availability_rules.told(drawn, outsider, {first.cluster}) == []
    for liar, said in ((outsider, [0]), (voter, [len(drawn)])):
        assert "not drawn for" in availability_rules.finding_fault(drawn, liar, said)


def test_who_is_found_without_its_shares_loses_more_standing_than_it_earns_between_two_looks():
    run = run_of()
    records = {name(number): Record(20, counted=20) for number in range(4)}

    def after(counted: set[str], lacking: set[str], excluded: dict[str, pb.Reason] | None = None) -> dict[str, Record]:
        return reputation.after(
            run, records, counted, excluded or {}, {"lacking": lacking}, lacking, set(records), genesis=False
        )

    found = after(set(records), {name(1)})
    assert found[name(0)] == Record(21, counted=21)
    assert found[name(1)] == Record(20 - ROUNDS // 4, counted=21, lacking=1)
    refused = after(set(records) - {name(1)}, {name(1)}, {name(1): pb.REASON_HARMS})[name(1)]
    assert refused.earned == 20 - ROUNDS // reputation.REFUSAL_SHARE, "once, and for the worse of the two"
    newcomer = reputation.newcomer(run)
    for earned in range(newcomer.earned, ROUNDS + 1):
        once = {name(0): Record(earned)}
        for round in range(availability_rules.PART):  # missing in one of these rounds, and counted in all
            once = reputation.after(run, once, {name(0)}, {}, {}, {name(0)} if not round else (), {name(0)}, genesis=False)
        assert once[name(0)].earned <= max(earned, newcomer.earned + availability_rules.PART), (
            "it does not earn more than it loses"
        )
    low = reputation.after(run, {name(0): newcomer}, {name(0)}, {}, {}, {name(0)}, {name(0)}, genesis=False)
    assert low[name(0)].earned == newcomer.earned


def voted(said: dict[int, list[int]]) -> tuple[Table, list[Judgement]]:
    """Return a round of twelve, in which these voters report missing samples, and the judgements of their votes."""
    table = Table(run_of()).genesis(range(12))
    table.contribute(range(12))
    taken = []
    for number in range(12):
        receipt = table.receipt(number)
        receipt.body.lacking.extend(said.get(number, []))
        taken.append(table.submit(seal(identity(number), pb.KIND_RECEIPT, table.run.run_id, receipt.body)))
    return table, taken


def test_a_commit_says_what_receipts_told_and_whoever_verifies_comes_to_the_same():
    run, head = run_of(), head_of()
    [asked] = availability_rules.due(run, head)
    numbers = {name(number): number for number in range(12)}
    table, taken = voted({numbers[voter]: [0] for voter in asked.samplers})
    assert {each.outcome for each in taken} == {Outcome.ACCEPT}
    commit = table.commits[-1].body
    [member] = [each for each in commit.roster if each.standing.lacking]
    assert member.cluster == asked.cluster
    assert table.head.standings[asked.cluster].lacking == 1
    verified, _ = chain.extend(run, head, table.commits[-1].envelope)
    assert verified.digest == table.commits[-1].digest
    few = next(iter(asked.samplers))
    table, _ = voted({numbers[few]: [0]})
    assert not [each for each in table.commits[-1].body.roster if each.standing.lacking]


def test_a_receipt_that_tells_of_another_s_sample_is_turned_away():
    [asked] = availability_rules.due(run_of(), head_of())
    outsider = next(number for number in range(12) if name(number) not in (*asked.samplers, asked.cluster))
    _, taken = voted({outsider: [0]})
    assert taken[outsider].outcome is Outcome.REJECT


def test_a_node_tells_what_it_found_last():
    run, head = run_of(), head_of()
    state = member.start(run, name(0), head)
    for shown, without in ((False, {"x"}), (True, set()), (False, {"x"})):
        state, _ = member.step(state, Sampled("x", shown), 0.0)
        assert lacking_of(state) == without


def test_committed_findings_of_the_closed_round_are_not_reported_in_the_next():
    table = Table(run_of()).genesis(range(12))
    state = member.start(table.run, name(0), table.head)
    state, _ = member.step(state, Sampled(name(1), shown=False), 0.0)
    table.train(1, range(12))
    state, _ = member.step(state, member_io.Committed(table.commits[-1], table.head), 0.0)
    assert not lacking_of(state)
