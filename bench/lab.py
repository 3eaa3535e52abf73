"""Clusters in one process that exchange through function calls: the product without its network and clock.

Each cluster drives the phase machine (protocol/member/phase.py) and the trainer as a worker of one rank does. So a bench
measures the product's code: a golden test verifies equal bits. Steps replace the network's delay: they say when a
commit arrives. Alternatively a site's clock (time_model.py) computes that delay from the payloads' bytes, and gives the
time.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from bench.committee import Committee, Seconds, Votes, Work
from bench.texts import stdlib
from dilocox.node.outer.state import EncodedStage, StageState
from dilocox.node.planning.time_model import Method, Site, Timeline
from dilocox.node.training.model.data import Dataset, load_dataset
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.protocol import norms
from dilocox.protocol.consensus import chain, reputation, weighting
from dilocox.protocol.consensus.head import Cluster, Head, initial_head
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import Apply, Encode, End, PhaseState, Train, Turn
from dilocox.protocol.payload.payload_index import check_bounds, check_leaves, check_payload
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run import adaptive
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import digest_of

__all__ = ["Arrival", "Hostile", "Lab", "Point", "Sent", "announcement", "process_group_of_one"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Point:
    """One applied commit."""

    steps: int
    """Inner steps that the first cluster has done."""
    tokens: int
    """Read by all clusters."""
    wire_bytes: int
    """Sent by one cluster since the start."""
    loss: float
    """Held-out loss of the committed model, nats per token."""
    error: float
    """Mean relative error of the payloads in the commit."""
    rank_or_k: int = 0
    """Rank or k of their codec."""
    seconds: float = 0.0
    """Seconds by the site's clock when the commit is applied; 0 without a site."""


def process_group_of_one() -> None:
    """Create the process group for a pipeline of one worker, in a process that trains on one thread."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]


Arrival = Callable[["Lab", int], int]
"""(lab, index of a cluster) -> the inner step of its running phase at which the last commit reaches it."""


@dataclass
class Member:
    """One cluster."""

    trainer: Trainer
    state: PhaseState
    prepared: Head | None = None
    """The last commit is in Θ, and not yet applied."""
    payloads: dict[int, bytes] = field(default_factory=dict)
    """Digests of what is in flight, by stage."""
    total_steps: int = 0


@dataclass(frozen=True)
class Sent:
    """Contribution of a cluster to a round."""

    contribution: pb.Contribution
    leaves: Sequence[pb.Leaf]

    @property
    def payloads(self) -> list[bytes]:
        """Return the digests, by stage."""
        return [leaf.digest for leaf in self.leaves]


def announcement(stages: Sequence[EncodedStage], tokens: int) -> Sent:
    """Return a cluster's announcement of its payloads, for no round yet."""
    leaves = [
        pb.Leaf(
            stage=stage,
            digest=digest_of([each.raw]),
            size=len(each.raw),
            norms=bytes(norms.norm_code(norm) for norm in each.norms),
        )
        for stage, each in enumerate(stages)
    ]
    contribution = pb.Contribution(
        tokens=tokens,
        size=sum(leaf.size for leaf in leaves),
        norm=norms.norm_code(math.hypot(*(stage.norm for stage in stages))),
        effective_rank=sum(stage.effective_rank for stage in stages) / len(stages),
        error=sum(stage.error for stage in stages) / len(stages),
    )
    return Sent(contribution, leaves)


class Hostile(Protocol):
    """Clusters that do harm, together."""

    @property
    def clusters(self) -> Container[int]: ...

    def targets(self, lab: "Lab", targets: Tensor) -> Tensor:
        """Return the targets that they train on instead."""

    def announce(self, lab: "Lab", sent: Mapping[str, Sent]) -> Mapping[str, Sent]:
        """Return their announcements, by cluster, made from the work of all clusters and their own; new payloads go to
        `lab.put`."""

    def vote(self, lab: "Lab", voter: str, found: Votes) -> Votes:
        """Return the voter's verdict on each contribution, from its honest votes."""


@dataclass
class Lab:
    run: Manifest
    clusters: int
    arrive_at: int | Arrival = 0
    """Inner step of the next phase at which a commit arrives; ignored if a cluster waits for it."""
    site: Site | None = None
    """Site whose clock decides when a commit arrives instead."""
    speeds: Sequence[float] = ()
    """Inner steps a second of each cluster, for time-boxed rounds."""
    names: Sequence[str] = ()
    """Cluster ids, in order: payloads are added up in it."""
    device: torch.device = CPU
    evaluate_every: int = 1
    data: Path | None = None
    """Folder of the run's corpus; None: it is the standard library's."""
    hostile: Hostile | None = None
    looks_for_bias: bool = True
    """True: voters take sketches, as in the product."""
    states: type[StageState] = StageState
    """Stage state of a cluster: the product's, or one that encodes as another method does."""
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = names = self.names or [f"cluster-{index:04}" for index in range(self.clusters)]
        roster = {name: Cluster(name, (), joined=1) for name in names}
        self.counted: dict[str, Sent] = {}
        """Contributions of the last commit, by cluster."""
        self.announced: dict[str, Sent] = {}
        """Contributions announced for the last commit."""
        self.refused: list[str] = []
        """Reasons of voters to reject hostile payloads."""
        self.harmful: list[tuple[int, str]] = []
        """Round and author of what its committee refused."""
        self.judged: list[tuple[int, str]] = []
        """Verdicts on all valid contributions."""
        self.seconds = Seconds()
        self.takes: list[Take] = []
        self.head = self._advance(replace(initial_head(""), roster=roster), {})
        """Head that the chain implies."""
        self._rank_or_k = self.head.rank_or_k
        """Rank or k of the head's payloads."""
        self._blobs: dict[bytes, bytes] = {}
        self._contributions: dict[str, Sent] = {}
        """Contributions of the open round, by cluster."""
        self._samples_read: dict[str, int] = {}
        if self.site is not None and self.site.clusters != self.clusters:
            raise ConfigError(f"a lab of {self.clusters} clusters on a site of {self.site.clusters}")
        self.timeline = Timeline(self.site) if self.site is not None else None
        self._phase_steps = 0
        """Steps of the longest phase of the open round."""
        self.wire_bytes = self.tokens = 0
        self.dataset: Dataset = load_dataset(self.run, self.data or stdlib().folder)
        self.committee = Committee(self.run, self.dataset, self.seconds, self.looks_for_bias)
        self.members = []
        for name in names:
            self.members.append(Member(self.beginner(), phase.begin(self.run, name, self.head)))

    def beginner(self) -> Trainer:
        """Return a trainer with the initial state of the run."""
        trainer = Trainer(self.run, Mesh(device=self.device))
        if self.states is not StageState:
            trainer.states = [self.states(self.run, stage) for stage in trainer.stages]
        trainer.load_initial()
        return trainer

    def step(self, trainer: Trainer, inputs: Tensor, targets: Tensor) -> None:
        """Take an inner step, at the latest when `finish_steps` is called."""
        trainer.step(inputs, targets)

    def finish_steps(self) -> None:
        """Finish the steps, before other code reads or writes live parameters."""

    def batch(self, index: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of a cluster: (inputs, targets)."""
        return self.dataset.batch(positions)

    @property
    def trainers(self) -> list[Trainer]:
        return [member.trainer for member in self.members]

    @property
    def losses(self) -> list[float]:
        """Return the held-out loss of the committed model after each evaluated commit."""
        return [point.loss for point in self.points]

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the largest cluster's payloads in the last commit."""
        return max((int(sent.contribution.size) for sent in self.counted.values()), default=0)

    def rounds(self) -> Self:
        """Run the remaining rounds of the run."""
        while self.head.round <= self.run.rounds.count:
            self.round()
        self.settle()
        if self.run.rounds.count % self.evaluate_every:
            self.measure()
        return self

    def settle(self) -> None:
        """Apply the last commit, after the last phase: every cluster rebases onto it."""
        self._take_turns(lambda member: member.state.head is not self.head)

    def round(self) -> None:
        """Run every cluster's phase, and the commit that counts the accepted contributions; it is applied in the next
        round's phases."""
        number = self.head.round
        self._take_turns(lambda member: member.state.round == number)
        self.counted = self._counted()
        self.wire_bytes += self.payload_bytes
        if self.timeline is not None:
            self.timeline.phase(self._phase_steps, self._method(), self._waited_for(number - 1))
        self._phase_steps = 0
        self._rank_or_k = self.head.rank_or_k
        self.head = self._advance(self.head, self._samples_read)
        self.committee.closed({name: sent.contribution.norm for name, sent in self.counted.items()}, self.head.norm)
        kept = {digest for sent in self.announced.values() for digest in sent.payloads}
        kept |= {digest for member in self.members for digest in member.payloads.values()}
        self._blobs = {digest: raw for digest, raw in self._blobs.items() if digest in kept}

    def _method(self) -> Method:
        """Return the method of the last commit."""
        rounds = self.run.rounds
        return Method("", self.payload_bytes, self.head.inner_steps, rounds.max_inner_steps, rounds.overlap)

    def _waited_for(self, round: int) -> bool:
        return round > 0 and self.run.overlap(round) == "none"

    def _counted(self) -> dict[str, Sent]:
        """Return the counted contributions: all honest ones, and valid hostile announcements that no committee rejected."""
        announced = self.announced = self._announced()
        well_made = {name: sent for name, sent in sorted(announced.items()) if self._is_well_made(name, sent)}
        refused = self._refused(announced, well_made) if self.run.scoring.voters else {}
        self.judged += [(self.head.round, name) for name in well_made]
        self.harmful += [(self.head.round, name) for name in well_made if name in refused]
        return {name: sent for name, sent in well_made.items() if name not in refused}

    def _announced(self) -> dict[str, Sent]:
        if self.hostile is None:
            return self._contributions
        said = self.hostile.announce(self, self._contributions)
        for member in self.members:
            if member.state.cluster in said:
                member.payloads = {leaf.stage: leaf.digest for leaf in said[member.state.cluster].leaves}
        return {**self._contributions, **said}

    def _is_well_made(self, name: str, sent: Sent) -> bool:
        return not self._is_hostile(name) or self._passes(name, sent)

    def _is_hostile(self, name: str) -> bool:
        return self.hostile is not None and self._names.index(name) in self.hostile.clusters

    def _refused(self, announced: Mapping[str, Sent], well_made: Container[str]) -> Container[str]:
        """Return the contributions that their committees reject. Every phase of the round is over and no commit has
        arrived, so each Θ is still the round's base."""
        trainers = {member.state.cluster: member.trainer for member in self.members}
        works = {
            name: Work(sent.payloads, sent.contribution.norm, sent.contribution.tokens) for name, sent in announced.items()
        }
        return self.committee.refused(self.head, trainers, works, well_made, self.payload, self._say)

    def _say(self, voter: str, found: Votes) -> Votes:
        return self.hostile.vote(self, voter, found) if self.hostile is not None and self._is_hostile(voter) else found

    def _passes(self, cluster: str, sent: Sent) -> bool:
        try:
            check_leaves(sent.contribution, sent.leaves)
            for leaf in sent.leaves:
                check_bounds(self.run, leaf)
                check_payload(self.run, cluster, self.head.round, leaf, self._blobs[leaf.digest], self.head.rank_or_k)
        except RemoteError as error:
            self.refused.append(f"round {self.head.round}: {error.detail}")
            return False
        return True

    def put(self, raw: bytes) -> bytes:
        """Store a payload of the open round; return its digest."""
        digest = digest_of([raw])
        self._blobs[digest] = raw
        return digest

    def _take_turns(self, unfinished: Callable[[Member], bool]) -> None:
        """Run one turn of each cluster after the other, until none is unfinished."""
        while waiting := [index for index, member in enumerate(self.members) if unfinished(member)]:
            before = self._applied()
            trained = [self._train_on(index) for index in waiting]
            for index, has_trained in zip(waiting, trained, strict=True):
                self._act(index, has_trained)
            if self._applied() > before and (self.head.round - 1) % self.evaluate_every == 0:
                self.measure()

    def _applied(self) -> int:
        """Return the commits that every cluster has applied."""
        return min(member.state.head.round for member in self.members)

    def _train_on(self, index: int) -> bool:
        """Take a step of a cluster, unless it rebases onto a commit first; return whether it took one."""
        trains = not self._arrives(index, self.members[index].state.steps)
        if trains:
            self._train(index)
        return trains

    def _act(self, index: int, trained: bool) -> None:
        member = self.members[index]
        steps = member.state.steps + trained
        if self._arrives(index, steps):
            self._prepare(member)
        box = self.run.rounds.round_seconds
        time_is_up = box is not None and steps >= box * (self.speeds[index] if self.speeds else 1.0)
        member.state, actions = phase.step(member.state, Turn(trained, member.prepared, True, time_is_up))
        if any(isinstance(action, Apply | End) for action in actions):
            self.finish_steps()
        for action in actions:
            match action:
                case Apply():
                    member.trainer.rebase(action.keep_private)
                    member.prepared = None
                case End():
                    member.trainer.end_phase(action.round, action.restart)
                case Encode():
                    self._encode(member, action)

    def _arrives(self, index: int, steps: int) -> bool:
        """Return whether the last commit reaches a cluster now, after `steps` of its phase."""
        member = self.members[index]
        if member.prepared is not None or member.state.head.round == self.head.round:
            return False
        return steps >= self._arrival(index) or not isinstance(phase.next_action(member.state), Train)

    def _arrival(self, index: int) -> int:
        if self.timeline is not None:
            return self.timeline.arrival_step(self._waited_for(self.head.round - 1))
        return self.arrive_at if isinstance(self.arrive_at, int) else self.arrive_at(self, index)

    def _train(self, index: int) -> None:
        member = self.members[index]
        action = phase.next_action(member.state)
        if not isinstance(action, Train):
            raise RuntimeError(f"a cluster of the lab waits for ever: {action.why}")
        inputs, targets = self.batch(index, list(action.positions))
        if self.hostile is not None and index in self.hostile.clusters:
            targets = self.hostile.targets(self, targets)
        with self.seconds.spent("training"):
            self.step(member.trainer, inputs, targets)
        member.total_steps += 1
        self.tokens += self.run.tokens_per_step

    def _prepare(self, member: Member) -> None:
        commit = Commit(self.head.round - 1, self._rank_or_k, self.takes)
        announced = member.payloads if phase.closes(member.state, commit.round) else {}
        member.trainer.prepare(commit, self.payload, member.state.cluster, announced)
        member.prepared = self.head

    def payload(self, digest: bytes) -> memoryview:
        """Return a payload of the last commit, or of the open round."""
        return memoryview(self._blobs[digest])

    def _encode(self, member: Member, ended: Encode) -> None:
        name = member.state.cluster
        stages = member.trainer.encode(name, ended.round, ended.rank_or_k)
        for state, stage in zip(member.trainer.states, stages, strict=True):
            member.payloads[state.stage] = self.put(stage.raw)
        self._contributions[name] = announcement(stages, ended.inner_steps * self.run.tokens_per_step)
        self._samples_read[name] = ended.samples_read
        self._phase_steps = max(self._phase_steps, ended.inner_steps)

    def _advance(self, head: Head, samples_read: dict[str, int]) -> Head:
        """Advance the head as chain.compose does. But a cluster that is not counted retains its seat, which a run takes
        after MISSED_COMMITS, and its samples are settled."""
        ledger, bodies = head.ledger, {name: sent.contribution for name, sent in self.counted.items()}
        for name in sorted(samples_read):
            ledger = ledger.settle(name, samples_read[name])
        ahead = chain.LEASE_PHASES * self.run.rounds.max_inner_steps * self.run.training.batch_size
        first = self.run.compression.keep
        rank_or_k = adaptive.next_rank_or_k(self.run, head.rank_or_k, list(bodies.values())) if head.round else first
        median, clips = weighting.clip(self.run, {name: body.norm for name, body in bodies.items()}, head.standings)
        weights = weighting.weights(self.run, {name: body.tokens for name, body in bodies.items()}, head.standings)
        says = reputation.by_standing(self.run, head.standings, bodies)
        announced = [
            weighting.Announced(sent.contribution.norm, clips[name], says[name], [leaf.norms for leaf in sent.leaves])
            for name, sent in self.counted.items()
        ]
        by_tensor = weighting.tensor_clips(self.run, announced)
        self.takes = [
            Take(name, weights[name], sent.payloads, clips[name], tensors)
            for (name, sent), tensors in zip(self.counted.items(), by_tensor, strict=True)
        ]
        refused = dict.fromkeys((name for at, name in self.harmful if at == head.round), pb.REASON_HARMS)
        scored = {name for at, name in self.judged if at == head.round and self.run.scoring.voters}
        return replace(
            head,
            round=head.round + 1,
            standings=reputation.after(
                self.run, head.standings, bodies.keys(), refused, {"scored": scored}, (), head.roster, genesis=not head.round
            ),
            trained=head.trained + bool(bodies),
            ledger=ledger.top_up(sorted(head.roster), ahead),
            norm=median,
            rank_or_k=rank_or_k,
            inner_steps=self.run.rounds.inner_steps,
        )

    def evaluate(self) -> float:
        """Return the held-out loss of the committed model."""
        return self.trainers[0].evaluate_committed(self.dataset)

    def measure(self) -> None:
        self.finish_steps()
        loss = self.evaluate()
        errors = [sent.contribution.error for sent in self.counted.values()]
        error = sum(errors) / max(1, len(errors))
        seconds = self.timeline.committed if self.timeline is not None else 0.0
        steps, rank_or_k = self.members[0].total_steps, self._rank_or_k
        self.points.append(Point(steps, self.tokens, self.wire_bytes, loss, error, rank_or_k, seconds))

    def state(self) -> torch.Tensor:
        return torch.cat([state.committed.flatten() for state in self.trainers[0].states])
