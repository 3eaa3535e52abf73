"""Fifty peers, loss, delay, crashes, hostility, on a fake clock: every honest peer ends with one chain."""

from pathlib import Path

import pytest

from dilocox.protocol import chain
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import COORDINATOR, digest, manifest
from tests.sim.swarm import SimPeer, Swarm


def build(tmp_path: Path, peers: int, seed: int, rounds: int = 8, **network: float) -> Swarm:
    run = manifest(
        rounds={
            "count": rounds,
            "inner_steps": 30,
            "max_inner_steps": 90,
            "min_clusters": peers // 3,
            "start_clusters": peers // 2,
            "deadline_seconds": 200,
            "vote_seconds": 60,
            "liveness_seconds": 20,
        }
    )
    return Swarm(run, tmp_path, peers, seed, network.get("loss", 0.05), network.get("delay", 0.5))


def check(swarm: Swarm) -> None:
    """One chain, verified from outside, held by everybody who is up; equal states; equal data accounts."""
    head = chain.initial_head()
    for commit in swarm.commits:
        head, _ = chain.extend(swarm.run, COORDINATOR.peer, head, commit.envelope)
    assert head == swarm.state.head
    assert head.finished
    for peer in swarm.peers:
        if peer.up and peer.name not in swarm.cut:
            assert [c.envelope for c in peer.commits] == [c.envelope for c in swarm.commits]
    assert len({tuple(peer.states()) for peer in swarm.peers if peer.up}) == 1
    final = {state.stage: state.digest for state in swarm.commits[-1].body.states}
    assert list(final.values()) == swarm.peers[0].states()


@pytest.mark.parametrize("seed", range(2))
def test_fifty_peers_with_loss_delay_and_crashes_end_with_one_chain(tmp_path: Path, seed: int):
    swarm = build(tmp_path, 50, seed, loss=0.1, delay=1.0)
    for number in range(1, 12):
        at = 20.0 + 23 * number
        swarm.crash(number, at, at + swarm.random.uniform(5, 120))
    swarm.crash(40, 60.0, None)
    swarm.partition(30, 40.0, 160.0)
    swarm.partition(31, 100.0, 140.0)
    swarm.crash_coordinator(90.0, 130.0)
    swarm.crash_coordinator(210.0, 215.0)
    swarm.run_until_finished(3000)
    check(swarm)
    counted = [len(commit.body.counted) for commit in swarm.commits[1:-1]]
    assert min(counted) >= swarm.run.rounds.min_clusters
    assert max(counted) >= 40


def test_a_killed_peer_costs_no_round(tmp_path: Path):
    swarm = build(tmp_path, 6, 3, loss=0.0, delay=0.1)
    swarm.crash(5, 70.0, None)
    swarm.run_until_finished(2000)
    check(swarm)
    assert all(len(commit.body.counted) >= 5 for commit in swarm.commits[2:-1])  # the first round begins with three
    assert swarm.peers[5].name not in swarm.state.head.roster


def test_a_restarted_peer_is_counted_again(tmp_path: Path):
    swarm = build(tmp_path, 6, 4, rounds=12, loss=0.0, delay=0.1)
    swarm.crash(5, 70.0, 200.0)
    swarm.run_until_finished(3000)
    check(swarm)
    assert swarm.peers[5].name in {item.cluster for item in swarm.commits[-2].body.counted}


def test_a_late_joiner_is_counted_within_three_rounds(tmp_path: Path):
    swarm = build(tmp_path, 6, 5, rounds=12, loss=0.0, delay=0.1)
    swarm.crash(5, 0.5, 150.0)
    open_at_join: list[int] = []
    swarm.after(150.0, lambda: open_at_join.append(swarm.state.head.round))
    swarm.run_until_finished(3000)
    check(swarm)
    names = [{item.cluster for item in commit.body.counted} for commit in swarm.commits]
    first = next(number for number, counted in enumerate(names) if swarm.peers[5].name in counted and number > 2)
    assert first <= open_at_join[0] + 2


def loud(peer: SimPeer, body: pb.Contribution) -> None:
    body.payloads[0].norm = 1e6


def diverged(peer: SimPeer, body: pb.Contribution) -> None:
    body.payloads[1].base_state = digest("elsewhere", peer.name)


def greedy(peer: SimPeer, body: pb.Contribution) -> None:
    body.tokens *= 1000


def two_faced(peer: SimPeer, body: pb.Contribution) -> None:
    other = pb.Contribution.FromString(body.SerializeToString())
    other.loss = 0.5
    peer.submit(pb.KIND_CONTRIBUTION, other)


def test_hostile_peers_are_never_counted_and_stop_nobody(tmp_path: Path):
    swarm = build(tmp_path, 20, 6, loss=0.02, delay=0.3)
    for number, behaviour in ((15, loud), (16, diverged), (17, greedy), (18, two_faced), (19, loud)):
        swarm.peers[number].hostile = behaviour
    swarm.run_until_finished(3000)
    check(swarm)
    hostile = {peer.name for peer in swarm.peers if peer.hostile}
    for commit in swarm.commits:
        assert not hostile & {item.cluster for item in commit.body.counted}
    reasons = {item.reason for commit in swarm.commits for item in (*commit.body.excluded, *commit.body.refusals)}
    assert {pb.REASON_NORM_TOO_LARGE, pb.REASON_EQUIVOCATION, pb.REASON_IMPOSSIBLE_TOKENS} <= reasons


def test_every_sample_is_counted_at_most_once(tmp_path: Path):
    swarm = build(tmp_path, 12, 7, loss=0.05, delay=0.5)
    for number in range(4):
        swarm.crash(number, 40.0 + 30 * number, 100.0 + 40 * number)
    swarm.run_until_finished(3000)
    check(swarm)
    seen: set[int] = set()
    head = chain.initial_head()
    for commit in swarm.commits:
        read = {item.cluster: item for item in commit.body.counted}
        for envelope in commit.body.contributions:
            body = pb.Contribution.FromString(envelope.body)
            if body.cluster in read:
                lease = head.ledger.leases[body.cluster]
                positions = lease.positions(lease.counted, body.samples_read - lease.counted)
                assert positions is not None
                assert seen.isdisjoint(positions)
                seen.update(positions)
        head, _ = chain.extend(swarm.run, COORDINATOR.peer, head, commit.envelope)
