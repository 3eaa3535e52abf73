"""A swarm on a fake clock: the real round machine, log and chain; peers that follow the protocol; a network that is a heap.

Faults are scripted as coordinates: `crash(peer, at, until)`, `partition(peer, at, until)`; loss and delay are random from a seed.
A peer's model is a digest: applying a commit hashes the counted payloads into it, so equal chains mean equal states.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.coordinator.log import InputLog
from dilocox.protocol import chain, round
from dilocox.protocol.chain import Head
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope, seal
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import COORDINATOR, digest, identity

RETRY_SECONDS = 5.0
STEP_SECONDS = 1.0
TICK_SECONDS = 1.0


@dataclass
class SimPeer:
    """A node's protocol behaviour without tensors. What survives a crash is the chain and the announced contribution."""

    swarm: "Swarm"
    identity: Identity
    hostile: Callable[["SimPeer", pb.Contribution], None] | None = None
    head: Head = field(default_factory=chain.initial_head)
    commits: list[Statement] = field(default_factory=list)
    announced: Statement | None = None
    seen: dict[bytes, Statement] = field(default_factory=dict)
    up: bool = True
    life: int = 0
    """Counts restarts: events of an earlier life are void."""
    fold: list[bytes] = field(default_factory=list)
    folded: int = 0

    def __post_init__(self) -> None:
        self.fold = [digest("initial", stage) for stage in range(self.run.model.stages)]

    @property
    def name(self) -> str:
        return self.identity.peer

    @property
    def run(self) -> Manifest:
        return self.swarm.run

    def states(self) -> list[bytes]:
        """State per stage before the open round: a fold over the counted payloads."""
        while self.folded < len(self.commits):
            for item in self.commits[self.folded].body.counted:
                self.fold = [digest(state, p.digest) for state, p in zip(self.fold, item.payloads, strict=True)]
            self.folded += 1
        return self.fold

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.seen.clear()
        self.catch_up()

    def crash(self) -> None:
        self.up = False

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        life = self.life
        self.swarm.after(seconds, lambda: action() if self.up and self.life == life else None)

    def catch_up(self) -> None:
        """Ask for the commits we lack, and again later: the network may lose the answer."""
        number = self.head.round
        self.swarm.send(self, lambda: self.swarm.watch(self, number))
        self.after(RETRY_SECONDS, self.catch_up)

    def receive(self, envelope: pb.Envelope) -> None:
        if envelope.kind == pb.KIND_COMMIT:
            try:
                self.head, commit = self.swarm.extend(self.head, envelope)
            except RemoteError:
                return  # old, or a gap: catch_up asks again
            self.commits.append(commit)
            self.seen.clear()
            self.begin_round()
        else:
            statement = open_envelope(envelope, self.run.run_id, (pb.KIND_CONTRIBUTION, pb.KIND_BALLOT))
            if statement.kind == pb.KIND_CONTRIBUTION:
                self.seen[statement.digest] = statement
            elif statement.body.head == self.head.digest:
                self.vote(statement)

    def begin_round(self) -> None:
        if self.head.finished:
            return
        if self.name not in self.head.roster:
            self.claim()
        elif self.head.round > self.run.rounds.count:
            states = [pb.StageState(stage=s, digest=d) for s, d in enumerate(self.states())]
            self.submit(pb.KIND_STATE_REPORT, pb.StateReport(round=self.head.round, head=self.head.digest, states=states))
        else:
            steps = self.run.rounds.inner_steps
            number = self.head.round
            seconds = steps * STEP_SECONDS * self.swarm.random.uniform(0.8, 1.5)
            self.after(seconds, lambda: self.contribute(number, steps))

    def claim(self) -> None:
        states = [pb.StageState(stage=s, digest=d) for s, d in enumerate(self.states())]
        claim = pb.Claim(
            round=max(1, self.head.round),
            head=self.head.digest,
            cluster=self.name,
            first_stage=0,
            stage_count=len(states),
            states=states,
        )
        self.submit(pb.KIND_CLAIM, claim)

    def contribute(self, number: int, steps: int) -> None:
        if self.head.round != number or self.name not in self.head.roster:
            return
        if self.announced is None or self.announced.body.round != number:
            body = pb.Contribution(
                round=number,
                head=self.head.digest,
                cluster=self.name,
                inner_steps=steps,
                tokens=steps * self.run.tokens_per_step,
                loss=1.0,
                samples_read=self.head.ledger.leases[self.name].counted + steps * self.run.training.batch_size,
                payloads=[
                    pb.StagePayload(stage=s, base_state=d, digest=digest(self.name, number, s), size=9, norm=1.0)
                    for s, d in enumerate(self.states())
                ],
            )
            if self.hostile is not None:
                self.hostile(self, body)
            self.announced = seal(self.identity, pb.KIND_CONTRIBUTION, self.run.run_id, body)
        self.swarm.submit(self, self.announced)

    def vote(self, ballot: Statement) -> None:
        listed = set(ballot.body.contributions)
        mine = self.announced.digest if self.announced else b""
        if mine not in listed or not listed <= {*self.seen, mine}:
            return
        verdicts = []
        for key in sorted(listed - {mine}):
            payloads = self.seen[key].body.payloads
            honest = [p.base_state for p in payloads] == self.states() and all(p.norm <= 5 for p in payloads)
            reason = pb.REASON_UNSPECIFIED if honest else pb.REASON_NORM_TOO_LARGE
            verdicts.append(pb.ContributionVerdict(contribution=key, reason=reason))
        self.submit(pb.KIND_RECEIPT, pb.Receipt(round=self.head.round, head=self.head.digest, verdicts=verdicts))

    def submit(self, kind: pb.Kind, body: Any) -> None:
        self.swarm.submit(self, seal(self.identity, kind, self.run.run_id, body))


class Swarm:
    def __init__(self, run: Manifest, folder: Path, peers: int, seed: int, loss: float, delay: float) -> None:
        self.run, self.folder, self.loss, self.delay = run, folder, loss, delay
        self.random = random.Random(seed)
        self.now = 1000.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.peers = [SimPeer(self, identity(number)) for number in range(peers)]
        self.cut: set[str] = set()
        self.log = InputLog(folder / "inputs.db", run)
        self.coordinator_up = True
        self.heard: dict[str, float] = {}
        self.commits: list[Statement] = []
        self.ballot: Statement | None = None
        self.state = round.start(run, self.now)
        self._extended: dict[tuple[bytes, bytes], tuple[Head, Statement]] = {}

    def extend(self, head: Head, envelope: pb.Envelope) -> tuple[Head, Statement]:
        """`chain.extend`, computed once for all peers that stand at the same head: it is a pure function."""
        key = (head.digest, envelope.body)
        if key not in self._extended:
            self._extended[key] = chain.extend(self.run, COORDINATOR.peer, head, envelope)
        return self._extended[key]

    # Time and network

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def send(self, peer: SimPeer, action: Callable[[], None]) -> None:
        """One message between a peer and the coordinator: delayed, perhaps lost."""
        if peer.name not in self.cut and self.random.random() >= self.loss:
            self.after(self.random.expovariate(1 / self.delay), action)

    def submit(self, peer: SimPeer, statement: Statement) -> None:
        """Until acknowledged: what is lost is sent again while the peer lives and the round is open."""
        life, number = peer.life, peer.head.round

        def arrive() -> None:
            if self.coordinator_up:
                self.heard[peer.name] = self.now
                if peer.name in self.state.absent:
                    self.feed(round.Present(peer.name))
                self.feed(round.Received(statement))
                acknowledged.append(True)

        def attempt() -> None:
            if not acknowledged and peer.up and peer.life == life and peer.head.round == number:
                self.send(peer, arrive)
                self.after(RETRY_SECONDS, attempt)

        acknowledged: list[bool] = []
        attempt()

    def watch(self, peer: SimPeer, number: int) -> None:
        """Answer with the commits from `number` on and the open round."""
        if not self.coordinator_up:
            return
        self.heard[peer.name] = self.now
        if peer.name in self.state.absent:
            self.feed(round.Present(peer.name))
        events = [*self.commits[number:], *self.state.contributions.values(), *([self.ballot] if self.ballot else [])]

        def arrive() -> None:
            for event in events:
                if peer.up:
                    peer.receive(event.envelope)

        self.send(peer, arrive)
        if self.state.head.round == 0:
            self.send(peer, lambda: peer.claim() if peer.up and peer.head.round == 0 else None)

    def broadcast(self, statement: Statement) -> None:
        for peer in self.peers:
            self.send(peer, lambda peer=peer: peer.receive(statement.envelope) if peer.up else None)  # type: ignore[misc]

    # The coordinator

    def feed(self, event: round.Input) -> None:
        self.log.append(event, self.now)
        self._step(event, self.now)

    def _step(self, event: round.Input, now: float, replaying: bool = False) -> None:
        self.state, effects = round.step(self.state, event, now)
        for effect in effects:
            match effect:
                case round.SealCommit(body):
                    commit = seal(COORDINATOR, pb.KIND_COMMIT, self.run.run_id, body)
                    self.ballot = None
                    if body.round < len(self.commits):
                        assert self.commits[body.round].envelope == commit.envelope, "a replay made another commit"
                    else:
                        self.commits.append(commit)
                    if not replaying:
                        self.broadcast(commit)
                case round.SealBallot(body):
                    self.ballot = seal(COORDINATOR, pb.KIND_BALLOT, self.run.run_id, body)
                    if not replaying:
                        self.broadcast(self.ballot)
                case round.Relay(statement):
                    if not replaying:
                        self.broadcast(statement)

    def tick(self) -> None:
        if self.coordinator_up:
            deadline = round.next_deadline(self.state)
            if deadline is not None and self.now >= deadline:
                self.feed(round.Tick())
            for cluster in list(self.state.head.roster.values()):
                for name in cluster.peers:
                    silent = self.now - self.heard.get(name, self.now) > self.run.rounds.liveness_seconds
                    if silent and name not in self.state.absent:
                        self.feed(round.Absent(name))
        self.after(TICK_SECONDS, self.tick)

    def crash_coordinator(self, at: float, until: float) -> None:
        """Everything but the log is lost; the restart replays it and must stand where the crash happened."""

        def restart() -> None:
            before = self.state
            self.state, self.ballot, first = round.start(self.run, self.now), None, True
            for event, now in self.log.replay():
                if first:
                    self.state, first = round.start(self.run, now), False
                self._step(event, now, replaying=True)
            if not first:
                assert self.state == before, "a replay must stand where the crash happened"
            self.coordinator_up = True
            self.feed(round.Resumed())
            self.heard = dict.fromkeys(self.heard, self.now)

        self.after(at, lambda: setattr(self, "coordinator_up", False))
        self.after(until, restart)

    # Scripted faults

    def crash(self, number: int, at: float, until: float | None) -> None:
        self.after(at, self.peers[number].crash)
        if until is not None:
            self.after(until, self.peers[number].start)

    def partition(self, number: int, at: float, until: float) -> None:
        name = self.peers[number].name
        self.after(at, lambda: self.cut.add(name))
        self.after(until, lambda: self.cut.discard(name))

    def run_until_finished(self, limit: float) -> None:
        for peer in self.peers:
            peer.start()
        self.after(0, self.tick)
        end = self.now + limit
        while self._heap and self.now < end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if self.state.head.finished and all(p.head.finished for p in self.peers if p.up and p.name not in self.cut):
                return
        raise AssertionError(f"not finished after {limit} s: round {self.state.head.round}")
