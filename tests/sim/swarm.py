"""A swarm on a fake clock: the product's coordinator and node machines; a network that is a heap; disks that forget what was not
synced.

Faults are coordinates: `swarm.crash(2, at=70.0, until=200.0)`. Loss and delay are random from a seed. A peer's model is a digest:
applying a commit folds the counted payloads into it, so equal chains mean equal states.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.protocol import events, norms
from dilocox.protocol.checks import audit_rules, availability_rules
from dilocox.protocol.checks.audits import Audited, audits_of, results_of
from dilocox.protocol.checks.availability import Sampled
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.checks.scores import Scored
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import Head, HostRange, initial_head
from dilocox.protocol.consensus.rules import JUDGES
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine as round
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from tests.helpers import COORDINATOR, digest, identity

STEP_SECONDS = 1.0
OFFER_SECONDS = 3.0
"""A peer offers again what is not held."""
CONNECT_SECONDS = 2.0
CHECK_SECONDS = 0.3
"""About how long fetching and checking one contribution takes."""
LAUNCH_SECONDS = 2.0
"""Approximate seconds in which the workers of a cluster's hosts start."""
PATIENCE_SECONDS = 12.0
"""Seconds that a lead host waits for its other host before it hosts all stages itself."""
SYNC_SECONDS = 0.05
"""About how long a batch takes to the coordinator's disk."""
WALL_MS = 1_700_000_000_000


@dataclass
class Disk:
    """Data that a peer finds again after a crash."""

    commits: list[Statement] = field(default_factory=list)
    own: dict[pb.Kind, Statement] = field(default_factory=dict)
    serial: int = 0

    def copy(self) -> "Disk":
        return Disk(list(self.commits), dict(self.own), self.serial)


@dataclass
class SimPeer:
    """Drives the member machine: its workers train, fetch and check in time, without tensors."""

    swarm: "Swarm"
    identity: Identity
    hostile: Callable[["SimPeer", pb.Contribution], None] | None = None
    accuses: bool = False
    """True: it reports all work as wrong that it is drawn to audit."""
    speed: float = 1.0
    up: bool = False
    life: int = 0
    """Number of restarts: events of an earlier incarnation are void."""
    disk: Disk = field(default_factory=Disk)
    connected: bool = False
    phase_ends: float = 0.0
    """End of the running local phase; phases follow each other without a pause."""
    halted: str = ""
    left_out: str = ""
    """Sentence of a commit that left out a contribution which the coordinator had accepted; else empty."""
    last_arrival: float = 0.0
    team: "Boxes | None" = None
    """Cluster of two hosts with this peer as the lead host, or the other host."""

    @property
    def name(self) -> str:
        return self.identity.peer

    @property
    def run(self) -> Manifest:
        return self.swarm.run

    @property
    def head(self) -> Head:
        return self.state.head

    # Life

    def start(self) -> None:
        self.life += 1
        self.up, self.connected = True, False
        lead = self.team.lead.name if self.team is not None and self.team.box is self else ""
        self.state = member.start(
            self.run, self.name, initial_head(COORDINATOR.peer, self.run.model.root), self.disk.serial, lead
        )
        commits, self.disk.commits = self.disk.commits, []
        self.fold = digest("initial")
        self.ready: dict[int, bytes] = {0: self.fold}
        for commit in commits:
            self.state = replace(self.state, head=self.swarm.extend(self.head, commit.envelope)[0])
            self.keep(commit)
        self.phase_ends = self.swarm.now + self.phase_seconds()
        for statement in self.disk.own.values():
            self.feed(member_io.Signed(statement))
        if self.team is not None:
            self.team.look()
        self.train()
        self.after(0.0, self.connect)
        self.after(OFFER_SECONDS, self.offer)

    def crash(self) -> None:
        if self.up:
            self.up = False
            self.swarm.stream_broke(self, at_once=True)
            if self.team is not None:
                self.team.look()

    @property
    def works(self) -> bool:
        """Return whether workers train for this peer's own cluster."""
        return not self.state.leaving and (self.team is None or (self.team.lead is self and self.team.running))

    def train(self) -> None:
        """Give the workers the state that the open round starts from."""
        if self.works:
            self.feed(member_io.StateReady(self.head.round, self.fold, None))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        life = self.life
        self.swarm.after(seconds, lambda: action() if self.up and self.life == life else None)

    def keep(self, commit: Statement) -> None:
        """Store a commit and make the state after it."""
        self.disk.commits.append(commit)
        for item in chain.taken(commit.body):
            self.fold = digest(self.fold, item.contribution.leaves)
        self.ready[commit.body.round + 1] = self.fold

    # The coordinator's stream

    def connect(self) -> None:
        """Open the stream whenever it is not; the network may be cut."""
        if not self.connected and self.swarm.reaches(self):
            self.swarm.open_stream(self)
        self.after(CONNECT_SECONDS * self.swarm.random.uniform(0.5, 1.5), self.connect)

    def stream_opened(self, round: int, head: bytes) -> None:
        self.connected = True
        self.feed(member_io.Connected())
        for commit in self.disk.commits[round:]:  # the coordinator lost what it signed
            self.swarm.send(self, lambda commit=commit: self.swarm.take_back(self, commit))  # type: ignore[misc]
        self.offer(again=False)

    def receive(self, envelope: pb.Envelope) -> None:
        if envelope.kind != pb.KIND_COMMIT:
            kinds = (pb.KIND_CONTRIBUTION, pb.KIND_BALLOT)
            self.feed(member_io.Seen(open_envelope(envelope, self.run.run_id, kinds)))
            return
        known = pb.Commit.FromString(envelope.body).round
        if known < len(self.disk.commits):
            assert self.disk.commits[known].envelope.body == envelope.body, "the coordinator signed two commits for one round"
            return
        try:
            after, commit = self.swarm.extend(self.head, envelope)
        except RemoteError:
            self.swarm.stream_broke(self, at_once=False)  # a gap: the next stream starts at our head
            return
        self.keep(commit)
        self.feed(member_io.Committed(commit, after))
        for audit in audit_rules.duties(audits_of(after), after.round, self.name):
            if audit.name not in results_of(self.state):
                self.after(self.swarm.random.expovariate(1 / CHECK_SECONDS), lambda audit=audit: self.audit(audit))  # type: ignore[misc]
        self.train()

    # The machine

    def feed(self, event: member_io.Input) -> None:
        self.state, effects = member.step(self.state, event, self.swarm.now)
        for effect in effects:
            match effect:
                case member_io.Sign(kind, body):
                    self.sign(kind, body)
                case member_io.Judge(contribution):
                    self.after(self.swarm.random.expovariate(1 / CHECK_SECONDS), lambda c=contribution: self.judge(c))  # type: ignore[misc]
                case member_io.Measure(contribution):
                    self.after(self.swarm.random.expovariate(1 / CHECK_SECONDS), lambda c=contribution: self.score(c))  # type: ignore[misc]
                case member_io.Recheck(number):
                    self.after(CHECK_SECONDS, lambda number=number: self.feed(member_io.Rechecked(number, self.fold)))  # type: ignore[misc]
                case member_io.Halt(why):
                    self.halted = why
                case member_io.Emit(events.LeftOut() as told):
                    self.left_out = told.line()
        due = member.next_deadline(self.state)
        if due is not None:
            self.after(max(0.0, due - self.swarm.now), lambda: self.feed(member_io.Tick()))
        if self.team is not None:
            self.team.consent()
        if isinstance(event, member_io.Committed | member_io.StateReady):
            self.after(max(0.0, self.phase_ends - self.swarm.now), self.phase_over)

    def sign(self, kind: pb.Kind, body: Any) -> None:
        if kind == pb.KIND_CONTRIBUTION and self.hostile is not None:
            self.hostile(self, body)
        statement = seal(self.identity, kind, self.run.run_id, body)
        self.disk.own[kind] = statement
        self.disk.serial = max(self.disk.serial, getattr(body, "serial", 0))
        self.feed(member_io.Signed(statement))
        self.after(0.0, lambda: self.offer(again=False))

    def offer(self, again: bool = True) -> None:
        if self.connected:
            for statement in member.offers(self.state):
                self.swarm.submit(self, statement)
        if again:
            self.after(OFFER_SECONDS, self.offer)

    def phase_seconds(self) -> float:
        return self.run.rounds.inner_steps * STEP_SECONDS * self.speed * self.swarm.random.uniform(0.8, 1.5)

    def phase_over(self) -> None:
        """Contribute at the end of the workers' steps, if the peer is on the round's roster, and train on."""
        head = self.head
        lease = head.ledger.leases.get(self.name)
        if (
            not self.works
            or self.swarm.now < self.phase_ends
            or head.round == 0
            or self.name not in head.roster
            or lease is None
        ):
            return
        if pb.KIND_CONTRIBUTION in self.state.open.own or head.closing(self.run):
            return
        steps = self.run.rounds.inner_steps
        event = member_io.PhaseEnded(
            round=head.round,
            base=self.fold,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=1.0,
            samples_read=lease.counted + steps * self.run.training.batch_size,
            leaves=digest("leaves", self.name, head.digest),
            norm=norms.norm_code(1.0),
            size=2000,
            effective_rank=4.0,
            error=0.1,
            audit=digest("marks", self.name, head.digest) if self.run.audit.segments else b"",
            shares=digest("shares", self.name, head.digest) if self.run.availability is not None else b"",
        )
        self.sample()
        self.phase_ends = self.swarm.now + self.phase_seconds()
        self.feed(event)

    def judge(self, contribution: Statement[pb.Contribution]) -> None:
        body = contribution.body
        reason = pb.REASON_UNSPECIFIED if body.base_state == self.fold else pb.REASON_WRONG_BASE
        if body.leaves != digest("leaves", contribution.peer, body.head):
            reason = pb.REASON_NON_FINITE if body.leaves == digest("nonsense") else pb.REASON_COPIED
        self.feed(member_io.Judged(contribution.digest, (reason, 0)))

    def score(self, contribution: Statement[pb.Contribution]) -> None:
        harmful = contribution.body.error > 1  # as much as a model without tensors can measure
        self.feed(Scored(contribution.digest, Score(2.0, 2.5, -0.5) if harmful else Score(2.0, 1.5, 0.5)))

    def sample(self) -> None:
        """Answer the drawn probe: most report the same result, and some another one, or none."""
        for cluster in availability_rules.duties(availability_rules.due(self.run, self.head), self.name):
            if self.swarm.random.random() < 0.9:
                shown = digest("shows", cluster, self.head.digest)[0] < 128
                self.feed(Sampled(cluster, shown is (self.swarm.random.random() < 0.9)))

    def audit(self, audit: audit_rules.Audit) -> None:
        taken = chain.taken(self.disk.commits[audit.round].body)
        wrong = self.accuses or next(each for each in taken if each.cluster == audit.cluster).contribution.error > 1
        self.feed(Audited(audit, audit_rules.Result(pb.AUDIT_DIFFERS if wrong else pb.AUDIT_EQUAL)))


@dataclass
class Boxes:
    """Cluster of two hosts, as its lead host's team and the other host's follower drive their machines (node/boxes)."""

    lead: SimPeer
    box: SimPeer
    cut: bool = False
    """True while the link between them is cut."""
    formed: bool = False
    """True once both hosts were present in this incarnation of the lead host."""
    running: bool = False
    """Workers train."""
    alone: bool = False
    """The lead hosts all stages."""
    generation: int = 0

    def look(self) -> None:
        """Check the hosts, whenever one starts or ends, or the link changes."""
        here = self.box.up and not self.cut
        if not self.lead.up:
            self.formed = self.running = False
        elif here and (not self.running or self.alone):
            self.launch(alone=False, after=LAUNCH_SECONDS)
        elif not here and self.running and not self.alone:
            self.running = False
            self.lead.feed(member_io.Whole(False))
            self.lead.swarm.whole(self.lead)
            self.launch(alone=True, after=PATIENCE_SECONDS)
        elif not here and self.formed and not self.running:
            self.launch(alone=True, after=PATIENCE_SECONDS)

    def launch(self, alone: bool, after: float) -> None:
        self.generation += 1
        number = self.generation

        def begin() -> None:
            here = self.box.up and not self.cut
            if number != self.generation or not (alone or here):
                return
            self.formed = self.running = True
            self.alone = alone
            hosts = () if alone else (HostRange(self.lead.name, 0, 1), HostRange(self.box.name, 1, 1))
            self.lead.feed(member_io.Laid(hosts))
            self.lead.feed(member_io.Whole(True))
            self.lead.swarm.whole(self.lead)
            self.lead.phase_ends = self.lead.swarm.now + self.lead.phase_seconds()
            self.lead.train()

        self.lead.after(after, begin)

    def consent(self) -> None:
        """Let the host receive the layout to agree to."""
        if self.running and not self.alone and self.box.up and not self.cut and self.lead.up:
            claim = member.consent(self.lead.state)
            if claim is not None and claim != self.box.state.asked:
                self.box.after(0.01, lambda: self.box.feed(member_io.Asked(claim)))


class Swarm:
    def __init__(self, run: Manifest, peers: int, seed: int, loss: float = 0.0, delay: float = 0.1) -> None:
        self.run, self.loss, self.delay = run, loss, delay
        self.random = random.Random(seed)
        self.now = 1000.0
        self.wall_offset_ms = 0
        """Offset of a wall clock that an operator set."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.peers = [SimPeer(self, identity(number)) for number in range(peers)]
        self.by_name = {peer.name: peer for peer in self.peers}
        self.cut: set[str] = set()
        self.coordinator_cut = False
        self.streams: set[str] = set()
        """Peers with an open stream at the coordinator."""
        self._extended: dict[tuple[bytes, bytes], tuple[Head, Statement]] = {}
        # The coordinator: what is on disk, and what is not yet.
        self.commits: list[Statement] = []
        self.logged: list[tuple[round.Input, Moment]] = []
        self.coordinator_up, self.coordinator_life = True, 0
        self.fail_writes = False
        self.signed_here = False
        """True if this incarnation of the coordinator signed a commit."""
        self._unwritten: list[Any] = []
        self._unsent: list[Statement] = []
        self.ballot: Statement | None = None
        self.signed: dict[int, bytes] = {}
        """Digest of every commit that left the coordinator, by round: never two."""
        self.state = round.start(run, initial_head(COORDINATOR.peer, run.model.root), self.now)

    def extend(self, head: Head, envelope: pb.Envelope) -> tuple[Head, Statement]:
        """Run `chain.extend`, computed once for all peers at the same head: it is a pure function."""
        key = (head.digest, envelope.body)
        if key not in self._extended:
            self._extended[key] = chain.extend(self.run, head, envelope)
        return self._extended[key]

    # Time and network

    @property
    def moment(self) -> Moment:
        return Moment(self.now, WALL_MS + self.wall_offset_ms + int(1000 * self.now))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run an action at `time` after the beginning."""
        self.after(1000.0 + time - self.now, action)

    def reaches(self, peer: SimPeer) -> bool:
        return self.coordinator_up and not self.coordinator_cut and peer.up and peer.name not in self.cut

    def send(self, peer: SimPeer, action: Callable[[], None]) -> None:
        """Send one message between a peer and the coordinator: delayed, perhaps lost with its stream."""
        life, coordinator_life = peer.life, self.coordinator_life

        def arrive() -> None:
            if self.reaches(peer) and (peer.life, self.coordinator_life) == (life, coordinator_life):
                action()

        if self.random.random() < self.loss:
            self.stream_broke(peer, at_once=False)
        elif self.reaches(peer):  # a stream preserves the order of its messages
            peer.last_arrival = max(peer.last_arrival, self.now + self.random.expovariate(1 / self.delay))
            self.after(peer.last_arrival - self.now, arrive)

    def open_stream(self, peer: SimPeer) -> None:
        """Open a stream as the service's Watch: the position, the missing commits of the peer, the open round."""

        def arrive() -> None:
            length = len(self.commits)
            peer.stream_opened(length, self.commits[-1].digest if self.commits else b"")
            for commit in self.commits[len(peer.disk.commits) :]:
                peer.receive(commit.envelope)
            for slot in self.state.gathered.contributions.values():
                for statement in slot:
                    peer.receive(statement.envelope)
            if self.ballot is not None:
                peer.receive(self.ballot.envelope)
            if not peer.connected:
                return
            self.streams.add(peer.name)
            if len(peer.disk.commits) <= len(self.commits) and peer.state.whole:
                self.feed(round.Present(peer.name))

        self.send(peer, arrive)

    def whole(self, lead: SimPeer) -> None:
        """Send the heartbeat of a lead host: a cluster with an absent host delays no round."""

        def arrive() -> None:
            if lead.name in self.streams:
                self.feed(round.Present(lead.name) if lead.state.whole else round.Absent(lead.name))

        if lead.connected:
            self.send(lead, arrive)

    def stream_broke(self, peer: SimPeer, at_once: bool) -> None:
        """Close a stream: a killed process is noticed at once, a cut link when the liveness window has passed."""
        peer.connected = False
        if peer.up and hasattr(peer, "state"):
            peer.feed(member_io.Away())
        self.streams.discard(peer.name)
        life = peer.life

        def notice() -> None:
            if self.coordinator_up and peer.name not in self.streams and (at_once or peer.life == life):
                self.feed(round.Absent(peer.name))

        self.after(0.0 if at_once else self.run.rounds.liveness_seconds, notice)

    def submit(self, peer: SimPeer, statement: Statement) -> None:
        def arrive() -> None:
            judgement = self.feed(round.Received(statement))
            if peer.name not in self.streams:
                self.feed(round.Absent(peer.name))
            head = self.state.head.digest
            answer = member_io.Answered(statement, judgement.outcome, judgement.reason, judgement.detail, head)
            self.send(peer, lambda: peer.feed(answer))

        self.send(peer, arrive)

    def broadcast(self, statement: Statement) -> None:
        for peer in self.peers:
            if peer.connected:
                self.send(peer, lambda peer=peer: peer.receive(statement.envelope) if peer.connected else None)  # type: ignore[misc]

    # The coordinator's driver: written, then sent; a crash forgets what was not written.

    def feed(self, event: round.Input) -> Any:
        before = self.state
        self.state, effects = round.step(before, event, self.moment)
        if self.state is not before and self.state != before:
            self._unwritten.append((event, self.moment))
        judgement = None
        for effect in effects:
            match effect:
                case round.Reply(answer):
                    judgement = answer
                case round.Relay(statement):
                    self._unsent.append(statement)
                case round.Differ(number, clusters):
                    for name in clusters:
                        peer = self.by_name[name]
                        self.send(peer, lambda peer=peer, number=number: peer.feed(member_io.Differs(number)))  # type: ignore[misc]
                case round.SealCommit(body):
                    self.signed_here = True
                    commit = seal(COORDINATOR, pb.KIND_COMMIT, self.run.run_id, body)
                    self._unwritten += [commit, *self.inherited()]
                    self._unsent.append(commit)
                case round.SealBallot(body):
                    ballot = seal(COORDINATOR, pb.KIND_BALLOT, self.run.run_id, body)
                    self.feed(round.Received(ballot))
                    self._unsent.append(ballot)
        if self._unwritten or self._unsent:
            life = self.coordinator_life
            delay = self.random.expovariate(1 / SYNC_SECONDS)
            self.after(delay, lambda: self.flush() if self.coordinator_life == life else None)
        return judgement

    def inherited(self) -> list[tuple[round.Input, Moment]]:
        return [(event, self.moment) for event in round.inherited(self.state)]

    def feed_envelope(self, envelope: pb.Envelope) -> None:
        """Feed a statement that any peer forwards, whoever signed it."""
        self.feed(round.Received(open_envelope(envelope, self.run.run_id, JUDGES)))

    def flush(self) -> None:
        batch, self._unwritten = self._unwritten, []
        sent, self._unsent = self._unsent, []
        if batch and self.fail_writes:
            self.fail_writes, self._unwritten = False, batch
            self.stop_coordinator()
            self.after(3.0, self.start_coordinator)
            return
        for item in batch:
            if isinstance(item, Statement):
                self.commits.append(item)
                self.logged = []
            else:
                self.logged.append(item)
        for statement in sent:
            if statement.kind == pb.KIND_COMMIT:
                number = statement.body.round
                assert self.signed.setdefault(number, statement.digest) == statement.digest, f"two commits for round {number}"
                self.ballot = None
                for name in self.state.head.roster:
                    if name not in self.streams:
                        self.feed(round.Absent(name))
            if statement.kind == pb.KIND_BALLOT:
                self.ballot = statement
            self.broadcast(statement)

    def stop_coordinator(self) -> None:
        if self.coordinator_up:
            whole = not self._unwritten and self.state.head.round
            assert not whole or self.replayed() == self.state, "what is on disk makes another round"
            self.coordinator_up = False
            self.coordinator_life += 1
            self._unwritten, self._unsent, self.ballot = [], [], None
            for peer in self.peers:
                if peer.connected:
                    peer.connected = False
                    peer.feed(member_io.Away())
            self.streams.clear()

    def start_coordinator(self, healed: bool = False) -> None:
        """Start from the chain, and the inputs since its last commit; at first no peer is live."""
        if self.coordinator_up:
            return
        self.coordinator_up = True
        self.state = self.replayed()
        self.ballot = self.state.gathered.ballot
        self.signed_here = False
        self.feed(round.Resumed(healed))

    def replayed(self) -> round.RoundState:
        """Return the round state on disk."""
        head = initial_head(COORDINATOR.peer, self.run.model.root)
        for commit in self.commits:
            head = self.extend(head, commit.envelope)[0]
        state = round.start(self.run, head, self.logged[0][1].seconds if self.logged else self.now)
        for event, moment in self.logged:
            state, effects = round.step(state, event, moment)
            assert not any(isinstance(effect, round.SealCommit) for effect in effects), "a commit that nobody gets"
        return state

    def take_back(self, peer: SimPeer, commit: Statement) -> None:
        """Adopt the commit as RoundDriver.adopt does."""
        if commit.body.round != self.state.head.round or self.signed_here:
            return
        after, _ = self.extend(self.state.head, commit.envelope)
        self._unwritten, self._unsent = [], []
        self.commits.append(commit)
        self.state, self.ballot = round.start(self.run, after, self.now), None
        self.logged = self.inherited()
        self.feed(round.Resumed(healed=True))
        self.broadcast(commit)
        for name in sorted(self.streams):
            if len(self.by_name[name].disk.commits) <= len(self.commits):
                self.feed(round.Present(name))

    def tick(self) -> None:
        if self.coordinator_up:
            due = round.next_deadline(self.state)
            if due is not None and self.now >= due:
                self.feed(round.Tick())
        self.after(1.0, self.tick)

    # Scripted faults

    def crash(self, number: int, at: float, until: float | None) -> None:
        self.at(at, self.peers[number].crash)
        if until is not None:
            self.at(until, lambda: None if self.peers[number].up else self.peers[number].start())

    def cut_off(self, numbers: Sequence[int], at: float, until: float) -> None:
        def begin() -> None:
            for number in numbers:
                self.cut.add(self.peers[number].name)
                self.stream_broke(self.peers[number], at_once=False)

        def end() -> None:
            self.cut.difference_update(self.peers[number].name for number in numbers)

        self.at(at, begin)
        self.at(until, end)

    def cut_coordinator(self, at: float, until: float) -> None:
        def begin() -> None:
            self.coordinator_cut = True
            for peer in self.peers:
                self.stream_broke(peer, at_once=False)

        self.at(at, begin)
        self.at(until, lambda: setattr(self, "coordinator_cut", False))

    def crash_coordinator(self, at: float, until: float) -> None:
        self.at(at, self.stop_coordinator)
        self.at(until, self.start_coordinator)

    def restore_coordinator(self, at: float, until: float, commits_lost: int) -> None:
        """Restore the database from a backup without the newest commits, as far as more than half of the roster has them."""

        def restore() -> None:
            if not self.coordinator_up:
                length = self._length_that_peers_restore(max(0, len(self.commits) - commits_lost))
                if length < len(self.commits):
                    del self.commits[length:]
                    self.logged = []
                self.start_coordinator(healed=True)

        self.at(at, self.stop_coordinator)
        self.at(until, restore)

    def _length_that_peers_restore(self, length: int) -> int:
        """Return the shortest chain, from `length` on, whose lost commits are on the disks of more than half of its
        roster. A coordinator with that many live peers gets them back. Otherwise no peer could report that it signed
        these rounds already."""
        head = initial_head(COORDINATOR.peer, self.run.model.root)
        for number, commit in enumerate(self.commits):
            if number >= length and self._is_held(head):
                return number
            head = self.extend(head, commit.envelope)[0]
        return len(self.commits)

    def _is_held(self, head: Head) -> bool:
        peers = [self.by_name[name] for name in head.roster if name in self.by_name]
        holders = [peer for peer in peers if len(peer.disk.commits) >= len(self.commits)]
        return 2 * len(holders) > len(head.roster) > 0

    def restore_peer(self, number: int, at: float, until: float, backup_at: float) -> None:
        backup: list[Disk] = []
        peer = self.peers[number]
        self.at(backup_at, lambda: backup.append(peer.disk.copy()))

        def restore() -> None:
            if not peer.up and backup:
                peer.disk = backup[0].copy()
                peer.start()

        self.at(at, peer.crash)
        self.at(until, restore)

    def boxes(self, lead: int, box: int) -> None:
        """Make these two peers one cluster, before the beginning."""
        team = Boxes(self.peers[lead], self.peers[box])
        team.lead.team = team.box.team = team

    def cut_boxes(self, lead: int, at: float, until: float) -> None:
        """Cut the link between a lead host and its other host."""
        team = self.peers[lead].team
        assert team is not None

        def cut(now: bool) -> None:
            team.cut = now
            team.look()

        self.at(at, lambda: cut(True))
        self.at(until, lambda: cut(False))

    def leave(self, numbers: Sequence[int], at: float, until: float | None) -> None:
        """Send a departure, stop a little later, and claim again on return."""

        def say() -> None:
            for number in numbers:
                if self.peers[number].up:
                    self.peers[number].feed(member_io.LeaveRun())

        self.at(at, say)
        for number in numbers:
            self.crash(number, at + 5.0, until)

    def pause(self, numbers: Sequence[int], at: float, until: float) -> None:
        """Finish the round, leave, and come back after a while, with the process alive."""

        def tell(event: member_io.Input) -> None:
            for number in numbers:
                if (peer := self.peers[number]).up:
                    peer.feed(event)
                    if isinstance(event, member_io.Return):
                        peer.phase_ends = self.now + peer.phase_seconds()
                        peer.train()

        self.at(at, lambda: tell(member_io.LeaveRun(finishing=True)))
        self.at(until, lambda: tell(member_io.Return()))

    # Running

    def run_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Run the swarm; return whether `until` became true."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if until():
                return True
        self.now = end
        return until()

    def begin(self) -> "Swarm":
        for peer in self.peers:
            peer.start()
        self.after(0.0, self.tick)
        return self

    def finished(self) -> bool:
        everyone = all(peer.head.finished for peer in self.peers if peer.up and peer.name not in self.cut)
        return self.state.head.finished and everyone

    def run_until_finished(self, limit: float) -> None:
        self.begin()
        if not self.run_for(limit, self.finished):
            raise AssertionError(f"not finished after {limit} s: round {self.state.head.round}: {round.why_open(self.state)}")
