"""Test of a swarm with audits: three honest nodes, and one that claims training which it did not do."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from dilocox.protocol.checks import audit_rules
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.tensors import phase_bytes
from dilocox.protocol.wire.messages import canonical
from tests.e2e.conftest import PATIENCE_SECONDS, Swarm, build, late_member, running, wait_for
from tests.e2e.hostile import HostilePeer

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

OPTIONS = ["--devices", "1", "--step-seconds", "1"]
"""Three audits a round fit into it on two cores: most of each is the start of its process."""
CHANGES = {"[rounds]": "[audit]\nsegments = 4\nshare = 0.25\n[rounds]", "max_inner_steps = 200": "max_inner_steps = 80"}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    testnet = build(tmp_path_factory.mktemp("audit"), count=100_000, nodes=4, options=OPTIONS, changes=CHANGES)
    with running(testnet, rounds=2) as swarm:
        yield swarm


def audited(swarm: Swarm, member: str) -> list[dict[str, str]]:
    facts = swarm.testnet.member(member).facts()
    assert facts is not None
    with urlopen(f"{facts['api']}/v1/events?follow=no") as answer:
        lines = answer.read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return [event for event in events if event["event"] == "audited"]


def test_honest_work_is_computed_again_and_is_the_same(swarm: Swarm):
    honest = [member.name for member in swarm.testnet.nodes if member is not late_member(swarm)]
    found = lambda name: [each["found"] for each in audited(swarm, name)]  # noqa: E731
    wait_for(lambda: all(found(name).count("equal") > 1 for name in honest), "all have audited")
    everything = {each for name in honest for each in found(name)}
    assert not everything & {"near", "differs", "malformed"}, "on one machine, with as many threads, the bits are the same"


def made_up(mallory: HostilePeer, body: pb.Contribution) -> bytes:
    """Return audit checkpoints of a phase that was never trained, in a valid form."""
    run = mallory.run
    random = np.random.default_rng(body.round)
    sizes = [phase_bytes(run.model, run.training.optimizer == "muon", stage) // 4 for stage in range(run.model.stages)]
    every, batch = audit_rules.spacing(run), run.training.batch_size
    steps = [*range(0, body.inner_steps, every), body.inner_steps]
    first = body.samples_read - body.inner_steps * batch
    marks = [
        pb.Mark(
            step=step,
            samples_read=first + step * batch,
            optimizer_steps=step,
            states=[mallory.store.put([(random.standard_normal(size) * 0.02).astype(np.float32).data]) for size in sizes],
        )
        for step in steps
    ]
    return mallory.store.put([canonical(pb.Marks(marks=marks, machine="cpu", threads=1, workers=1))])


def test_who_did_not_train_is_refused_when_its_auditors_have_looked(swarm: Swarm, tmp_path: Path):
    link = JoinLink.parse((swarm.testnet.folder / "link").read_text())

    def pretend(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        body.audit = made_up(peer, body)

    def refused(evil: str) -> bool:
        rounds = range(max(0, swarm.open_round() - 20), swarm.open_round())
        return any(item["peer"] == evil and item["reason"] == "audit" for n in rounds for item in swarm.round(n)["excluded"])

    async def story() -> str:
        async with HostilePeer(link, tmp_path / "mallory") as mallory:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await asyncio.to_thread(refused, mallory.identity.peer):
                    await mallory.judged(pretend)
            return mallory.identity.peer

    evil = asyncio.run(story())
    honest = {swarm.peer(member.name) for member in swarm.testnet.nodes if member is not late_member(swarm)}
    blamed = {i["peer"] for n in range(swarm.open_round()) for i in swarm.round(n)["excluded"] if i["reason"] == "audit"}
    assert blamed == {evil}
    assert evil not in honest
