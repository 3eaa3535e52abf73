"""Test that the product equals the lab: real workers and the lab, with the same arrival steps, compute the same bits.

Two clusters of two workers each run as real processes under the real supervisor. The test replaces their daemons and
the coordinator, with commits from the real round machine. The workers report when they apply each commit, and the lab
uses these steps.
"""

import asyncio
import math
import os
from collections import defaultdict
from pathlib import Path

import pytest

from bench.lab import Lab
from bench.texts import stdlib
from dilocox.node.exchange.apply_builder import takes_of
from dilocox.node.workers.environment import WorkerSettings
from dilocox.node.workers.pool import Launch, WorkerPool
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore, digest_of
from tests.helpers import Table, identity, manifest

WORKERS = 2
DEADLINE_SECONDS = 240.0
"""Seconds for all rounds together, on a machine that is busy with other work."""
LATE = (3, 1)
"""(round, cluster) whose commit is delayed until the cluster has taken max_inner_steps and waits."""


def run_with(**rounds: object) -> Manifest:
    return manifest(
        model={"num_hidden_layers": 2, "sequence_length": 32},
        data={**stdlib().settings, "evaluation_sequences": 8},
        training={"optimizer": "muon", "learning_rate": 3e-3, "warmup_steps": 10},
        outer={"learning_rate": 0.9, "momentum": 0.3},
        compression={"codec": "topk-int2", "k": 400, "entropy_coding": True},
        rounds={"count": 5, "inner_steps": 8, "max_inner_steps": 14, "min_clusters": 2, "start_clusters": 2, **rounds},
    )


class Box:
    """One cluster: its workers, and their messages."""

    def __init__(self, run: Manifest, folder: Path, number: int) -> None:
        self.number, self.store = number, BlobStore(folder / "blobs")
        path = folder / "manifest.json"
        path.write_bytes(run.canonical_bytes())
        settings = WorkerSettings(
            "", path, folder / "blobs", folder / "stages", identity(number).peer, "cpu", 1, 1, (), stdlib().folder, 0.0
        )

        def environment(socket: str, launch: Launch) -> dict[str, str]:
            return {**os.environ, **settings.environment(), "DILOCOX_WORKER_SOCKET": socket}

        self.pool = WorkerPool(folder, environment)
        self.hellos = 0
        self.boundaries: dict[int, dict[int, pb.Boundary]] = defaultdict(dict)
        self.states: dict[int, dict[int, bytes]] = defaultdict(dict)
        """Digest per stage of the state before each round."""
        self.applied_at: dict[int, set[int]] = defaultdict(set)
        """Inner step at which each worker moved onto the state before a round."""
        self.held: tuple[int, pb.WorkerCommand] | None = None
        """A commit that waits for the phase in which it should arrive late."""

    def hear(self, rank: int, event: pb.WorkerEvent) -> None:
        assert not event.failed, event.failed
        match event.WhichOneof("event"):
            case "hello":
                self.hellos += 1
                if self.hellos == WORKERS:
                    self.pool.command(pb.WorkerCommand(start=pb.Start(origin=pb.Start.ORIGIN_INITIAL)))
            case "boundary":
                self.boundaries[event.boundary.round][rank] = event.boundary
            case "ready":
                self.states[event.ready.round].update({item.stage: item.digest for item in event.ready.states})
                self.applied_at[event.ready.round].add(event.ready.applied_at_step)
            case "step":
                if self.held is not None and event.step.waiting and event.step.round == self.held[0] + 1:
                    self.pool.command(self.held[1])
                    self.held = None

    def payloads(self, round: int) -> list[pb.StagePayload]:
        return [payload for _, part in sorted(self.boundaries[round].items()) for payload in part.payloads]

    def deliver(self, round: int, arrived: pb.Apply, late: bool) -> None:
        command = pb.WorkerCommand(apply=arrived)
        if late:
            self.held = round, command
        else:
            self.pool.command(command)


async def train(run: Manifest, boxes: list[Box], table: Table) -> None:
    """Train until every cluster has applied the last commit."""
    heard: asyncio.Queue[tuple[Box, tuple[int, pb.WorkerEvent] | None]] = asyncio.Queue()

    async def listen(box: Box) -> None:
        while True:
            await heard.put((box, await box.pool.events.get()))

    for box in boxes:
        await box.pool.open()
    tasks = [
        asyncio.create_task(work)
        for box in boxes
        for work in (box.pool.run_generation(Launch(range(WORKERS), WORKERS, 1)), listen(box))
    ]
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not all(len(box.states[run.rounds.count + 1]) == run.model.stages for box in boxes):
                box, event = await heard.get()
                assert event is not None, "a worker died"
                box.hear(*event)
                close_round(run, boxes, table)
    finally:
        for box in boxes:
            await box.pool.stop()
        for task in tasks[0::2]:
            await task
        for task in tasks[1::2]:
            task.cancel()
        for box in boxes:
            await box.pool.close()


def close_round(run: Manifest, boxes: list[Box], table: Table) -> None:
    """Close the open round with its commit, once all its inputs have arrived."""
    number = table.head.round
    if number == 0:
        if all(len(box.states[0]) == run.model.stages for box in boxes):
            table.genesis(range(len(boxes)))
            send(boxes, table, 0)
    elif all(len(box.boundaries[number]) == WORKERS for box in boxes):
        for box in boxes:
            for payload in box.payloads(number):
                for other in boxes:
                    other.store.put([box.store.view(payload.digest)])
            table.submit(table.contribution(box.number, lambda body, box=box: fill(body, box)))
        table.vote(range(len(boxes)))
        send(boxes, table, number)


def fill(body: wire.Contribution, box: Box) -> None:
    """Fill the contribution from the workers' messages, as a node does."""
    said = next(iter(box.boundaries[body.round].values()))
    body.inner_steps, body.tokens, body.loss, body.samples_read = said.inner_steps, said.tokens, said.loss, said.samples_read
    payloads = box.payloads(body.round)
    body.size = sum(payload.size for payload in payloads)
    body.norm = norm_code(math.hypot(*(payload.norm for payload in payloads)))
    body.effective_rank = sum(payload.effective_rank for payload in payloads) / len(payloads)
    body.error = sum(payload.error for payload in payloads) / len(payloads)


def send(boxes: list[Box], table: Table, round: int) -> None:
    assert table.head.round == round + 1
    commit, by_name = table.commits[-1], {identity(box.number).peer: box for box in boxes}
    items = taken(commit.body)
    leaves = [
        [wire.Leaf(stage=p.stage, digest=p.digest, size=p.size, norms=p.norms) for p in by_name[item.cluster].payloads(round)]
        for item in items
    ]
    takes = takes_of(table.run, items, leaves)
    for index, box in enumerate(boxes):
        box.deliver(round, pb.Apply(commit=commit.envelope.SerializeToString(), takes=takes), late=(round, index) == LATE)


@pytest.mark.e2e
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "rounds",
    [
        {"overlap": "rebase", "lead_weight": 0.5, "synchronous_rounds": 1},
        {"overlap": "delayed"},
    ],
    ids=["rebase", "delayed"],
)
def test_real_workers_and_the_lab_make_the_same_bits(tmp_path: Path, rounds: dict[str, object]):
    run = run_with(**rounds)
    numbers = sorted(range(2), key=lambda number: identity(number).peer)
    boxes = []
    for number in numbers:
        (tmp_path / str(number)).mkdir()
        boxes.append(Box(run, tmp_path / str(number), number))
    table = Table(run)
    asyncio.run(train(run, boxes, table))
    assert all(len(steps) == 1 for box in boxes for steps in box.applied_at.values()), "workers of a cluster act at one step"
    arrivals = [{round: next(iter(steps)) for round, steps in box.applied_at.items()} for box in boxes]
    lab = Lab(run, 2, lambda lab, index: arrivals[index][lab.head.round], names=[identity(n).peer for n in numbers])
    for number in range(1, run.rounds.count + 1):
        lab.round()
        expected = [digest_of([state.state_bytes()]) for state in lab.trainers[0].states]
        for box, sent in zip(boxes, lab.counted.values(), strict=True):
            assert [box.states[number][stage] for stage in range(run.model.stages)] == expected, f"the state before {number}"
            assert [payload.digest for payload in box.payloads(number)] == list(sent.payloads)
            assert next(iter(box.boundaries[number].values())).tokens == sent.contribution.tokens
    lab.settle()
    expected = [digest_of([state.state_bytes()]) for state in lab.trainers[1].states]
    for box in boxes:
        assert [box.states[run.rounds.count + 1][stage] for stage in range(run.model.stages)] == expected
    for name in ("round", "trained", "rank_or_k", "inner_steps", "ledger", "norm"):
        assert getattr(lab.head, name) == getattr(table.head, name)
    assert arrivals[1][LATE[0] + 1] == run.rounds.max_inner_steps, "the late commit was late"
