"""Test of the attack that running code has shown, on a swarm with scores: three honest nodes, and one that negates
another's payload."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.node.exchange.downloader import Downloader
from dilocox.node.outer.state import StageState
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.norms import norm_code
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.pb import messages_pb2 as pb
from tests.e2e.conftest import HAD_NO_TIME, PATIENCE_SECONDS, Swarm, build, late_member, running, wait_for
from tests.e2e.hostile import HostilePeer
from tests.exchanges import exchange_of

pytestmark = pytest.mark.e2e

ATTACKS = 3
CHANGES = {"[rounds]": "[scoring]\nvoters = 32\nshare = 1.0\n[rounds]"}
"""A busy machine has time for all scores."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    testnet = build(tmp_path_factory.mktemp("scores"), count=100_000, nodes=4, changes=CHANGES)
    with running(testnet, rounds=2) as swarm:
        yield swarm


async def turned(mallory: HostilePeer) -> list[StageState]:
    """Return another cluster's payload of the open round with negated signs, four times as large; by stage."""
    await mallory.until(lambda: mallory.state.on_roster and mallory.state.root is not None and bool(mallory.state.open.seen))
    theirs, rank_or_k = next(iter(mallory.state.open.seen.values())), mallory.state.head.rank_or_k
    downloader = Downloader(mallory.identity.peer, mallory.store, mallory.directory, mallory.channels)
    await downloader.fetch_forever(theirs.body.leaves, [theirs.peer])
    states = []
    for leaf in await exchange_of(mallory.run, downloader).applies.payload_index(theirs.body, [theirs.peer]):
        await downloader.fetch_forever(leaf.digest, [theirs.peer], stage=leaf.stage)
        state = StageState(mallory.run, leaf.stage)
        state.return_to_feedback(mallory.store.view(leaf.digest), rank_or_k)
        state.feedback.mul_(-4)
        states.append(state)
    return states


async def attack(mallory: HostilePeer) -> int:
    """Attack once; return the round, when it is closed."""
    states = await turned(mallory)

    def spoil(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        """Spoil the contribution in its own name, for the round that is open by now: it must not be rejected as a copy."""
        for state in states:
            owner = owner_of(peer.run.run_id, peer.identity.peer, body.round, state.stage)
            encoded = state.encode(peer.state.head.rank_or_k, owner)
            peer.serve(leaves, state.stage, encoded.raw, bytes(norm_code(norm) for norm in encoded.norms))

    return await mallory.judged(spoil)


def test_who_turns_another_s_payload_is_refused_by_what_it_does(swarm: Swarm, tmp_path: Path):
    link = JoinLink.parse((swarm.testnet.folder / "link").read_text())

    async def story() -> tuple[list[int], str]:
        async with HostilePeer(link, tmp_path / "mallory") as mallory:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return [await attack(mallory) for _ in range(ATTACKS)], mallory.identity.peer

    rounds, evil = asyncio.run(story())
    honest = {swarm.peer(member.name) for member in swarm.testnet.nodes if member is not late_member(swarm)}
    for number in rounds:
        detail = swarm.round(number)
        refused = {item["peer"]: item["reason"] for item in detail["excluded"]}
        assert refused.get(evil) == "harms", detail["excluded"]
        assert {refused[peer] for peer in honest & refused.keys()} <= {*HAD_NO_TIME}, detail["excluded"]
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")
    losses = [row["evaluation_loss"] for row in swarm.rounds() if row["evaluation_loss"]]
    assert losses[-1] < losses[0], "it learns all the same"
