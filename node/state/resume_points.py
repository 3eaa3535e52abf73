"""Resume points for workers, and the blobs each one needs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.node.exchange.downloader import Downloader, had
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.node.workers.phase_id import Phase, phase_of
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import NamedBy, taken
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import imported_bytes, state_bytes
from dilocox.protocol.wire.messages import Statement, canonical, stages_in
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["BOUNDARIES_KEPT", "COMPLETE_KEPT", "Candidate", "ResumePlanner", "state_blob", "without_commits"]

BOUNDARIES_KEPT = 2
"""Checkpoints whose blobs are stored: as many as the workers store."""
COMPLETE_KEPT = 2
"""Complete checkpoints whose blobs are stored: the last durable one, and one that the disk still writes."""
RECENT_STATES = 2
"""States of the last rounds are kept whether snapshots or not: a restart builds on them."""
SNAPSHOTS_KEPT = 2
"""Payloads are kept until two later snapshots are agreed."""


def state_blob(digests: Mapping[int, bytes]) -> bytes:
    """The blob whose digest is the state root; `digests` by stage."""
    return canonical(pb.StageStates(digests=[digests[stage] for stage in sorted(digests)]))


def _bare(boundary: worker.Boundary) -> worker.Boundary:
    """Without payloads."""
    bare = worker.Boundary.FromString(boundary.SerializeToString())
    del bare.payloads[:]
    return bare


def without_commits(start: worker.Start) -> worker.Start:
    """Return the start without commits, for another host, which has its own chain."""
    bare = worker.Start.FromString(start.SerializeToString())
    bare.ClearField("opening_commit")
    bare.ClearField("boundary_commit")
    return bare


@dataclass(frozen=True)
class Candidate:
    start: worker.Start
    root: bytes = b""
    """State root of a snapshot, whose stages are not known yet."""


class ResumePlanner:
    def __init__(
        self, manifest: Manifest, chain: ChainFile, downloader: Downloader, applies: ApplyBuilder, hosted: HostedStages
    ) -> None:
        self._manifest, self._chain, self._store = manifest, chain, downloader.store
        self._downloader, self._applies, self._hosted = downloader, applies, hosted

    @property
    def head(self) -> Head:
        """Return the head of this node's chain."""
        return self._chain.head

    def candidates(self, hellos: Sequence[worker.Hello], avoid_boundaries: bool) -> list[Candidate]:
        """Return the candidates for a start, the best first.

        The best is the newest checkpoint with the very state it was built on. Then an agreed snapshot, if the payloads
        between are gone (the inner optimizer and the error feedback stay; if stages moved between hosts, only of those
        that did not). Then a snapshot alone, and the beginning. After the snapshots, which peers store for long, comes
        the newest agreed state, which they do not: it replaces a missing payload.
        """
        snapshots = {**self._named(), **self._agreed_snapshots()}
        snapshots.update((round, root) for round, root in self._newest_agreed().items() if round not in snapshots)
        resumable = {} if avoid_boundaries else self._resumable(hellos)
        boundaries = [round for round in sorted(resumable, reverse=True) if round <= self._chain.head.round]
        starts = [
            Candidate(self._start(worker.Start.ORIGIN_BOUNDARY, boundary, boundary, resumable[boundary]))
            for boundary in boundaries
        ]
        for boundary in boundaries[:1]:
            later = {round: root for round, root in snapshots.items() if round > boundary}
            starts += [Candidate(self._start(worker.Start.ORIGIN_BOUNDARY, r, boundary), root) for r, root in later.items()]
        kept = None if avoid_boundaries or boundaries or self.undecided(hellos) else self._kept(hellos)
        for keeping in (kept, None) if kept is not None else (None,):
            for round, root in snapshots.items():
                start = self._start(worker.Start.ORIGIN_SNAPSHOT, round)
                if keeping is not None:
                    start.kept.CopyFrom(keeping)
                starts.append(Candidate(start, root))
        if root := self._manifest.model.imported_state:
            return [*starts, Candidate(self._start(worker.Start.ORIGIN_SNAPSHOT, 0), root)]
        return [*starts, Candidate(worker.Start(origin=worker.Start.ORIGIN_INITIAL))]

    def sound(self, hello: worker.Hello) -> worker.Hello:
        """Return what a worker of this host can resume: checkpoints whose payloads are here and valid. These are announced
        again, and uncounted parts return to the error feedback. Blocking."""
        after = worker.Hello.FromString(hello.SerializeToString())
        del after.boundaries[:]
        after.boundaries.extend(b for b in hello.boundaries if all(self._store.sound(p.digest) for p in b.payloads))
        return after

    def _resumable(self, hellos: Sequence[worker.Hello]) -> dict[int, list[worker.StageState]]:
        """Boundaries that every worker has, with the state they build on."""
        whole = ({phase_of(b) for b in hello.boundaries if len(b.payloads) == len(hello.stages)} for hello in hellos)
        phases = set.intersection(*whole)
        rounds = {round for round, *_ in phases}
        found: dict[int, list[worker.StageState]] = {round: [] for round in rounds}
        for hello in sorted((hello for hello in hellos if not hello.copy), key=lambda hello: int(hello.rank)):
            for boundary in hello.boundaries:
                if phase_of(boundary) not in phases or not self.of_our_chain(boundary):
                    found.pop(boundary.round, None)
                elif boundary.round in found:
                    found[boundary.round] += [worker.StageState(stage=p.stage, digest=p.base_state) for p in boundary.payloads]
        return found

    def _kept(self, hellos: Sequence[worker.Hello]) -> worker.Boundary | None:
        """The boundary of the phase that most stages have, of those the last whose commit is here: what a box had sealed of a later
        one was announced by nobody."""
        phases: dict[Phase, worker.Boundary] = {}
        for boundary in self._offered(hellos):
            if boundary.round < self._chain.head.round:
                phases.setdefault(phase_of(boundary), _bare(boundary)).payloads.extend(boundary.payloads)
        return max(phases.values(), key=lambda b: (len(b.payloads), b.round, b.samples_read), default=None)

    def undecided(self, hellos: Sequence[worker.Hello]) -> bool:
        """Whether some stages, and not all, were in the phase of the open round: its commit decides what they owe."""
        offered = any(boundary.round == self._chain.head.round for boundary in self._offered(hellos))
        return offered and not any(round <= self._chain.head.round for round in self._resumable(hellos))

    def _offered(self, hellos: Sequence[worker.Hello]) -> list[worker.Boundary]:
        """Return the checkpoints of workers with outer state."""
        first = [boundary for hello in hellos if not hello.copy for boundary in hello.boundaries]
        return [boundary for boundary in first if boundary.payloads and self.of_our_chain(boundary)]

    def of_our_chain(self, boundary: worker.Boundary) -> bool:
        """Return whether the checkpoint belongs to this chain: not if the owner has rejected its commits since."""
        opening = self._chain.commit(boundary.round - 1)
        return opening is not None and opening.digest == boundary.head

    def _agreed_snapshots(self) -> dict[int, bytes]:
        """Return roots of agreed snapshots that peers store for joiners, by round, the newest first."""
        found: dict[int, bytes] = {}
        newest = self._manifest.snapshot_round(max(1, self._chain.head.round))
        for round in range(newest, 1, -self._manifest.rounds.snapshot_every)[:SNAPSHOTS_KEPT]:
            commit = self._chain.commit(round)
            if commit is not None and commit.body.state:
                found[round] = commit.body.state
        return found

    def _newest_agreed(self) -> dict[int, bytes]:
        """Return the newest agreed state that peers still store, snapshot or not, by round."""
        for round in range(self._chain.head.round - 1, max(0, self._chain.head.round - 1 - RECENT_STATES), -1):
            commit = self._chain.commit(round)
            if commit is not None and commit.body.state:
                return {round: commit.body.state}
        return {}

    def _named(self) -> dict[int, bytes]:
        """Return the state that the owner named, if the next commit is the first of its appointment: an archive has it."""
        head = self._chain.head
        return {head.round: head.state} if head.state and head.appointment is not None else {}

    def agreed(self) -> dict[int, bytes]:
        """Return roots of agreed states that peers store, by round, the newest first."""
        return {**self._named(), **self._newest_agreed(), **self._agreed_snapshots()}

    def goes_around(self, round: int) -> bool:
        """Whether the run agreed on a state that this commit led to: who cannot have its payloads can start from there."""
        return any(later > round for later in (*self._agreed_snapshots(), *self._newest_agreed()))

    def _start(
        self,
        origin: worker.Start.Origin,
        round: int,
        boundary: int | None = None,
        states: Sequence[worker.StageState] = (),
    ) -> worker.Start:
        start = worker.Start(origin=origin, round=round, states=states)
        if boundary is not None:
            start.boundary = boundary
        return start

    async def complete(self, candidate: Candidate) -> worker.Start:
        """Return the start with the digests of all its stages, the result of the checkpoint's payloads, and the number of
        following commits. Raises RemoteError if that fails."""
        start = worker.Start.FromString(candidate.start.SerializeToString())
        if candidate.root:
            digests = await self.stages_of(start.round, candidate.root)
            start.states.extend(worker.StageState(stage=stage, digest=digest) for stage, digest in enumerate(digests))
        await self.with_commits(start)
        start.replays = len(self._replayed(start.round))
        return start

    async def with_commits(self, start: worker.Start) -> None:
        """Add the commits of this chain that the start needs: the one that opens its round, and its checkpoint's, if that
        is earlier."""
        start.opening_commit = (self._chain.raw(start.round - 1) if start.round else None) or b""
        boundary = start.kept.round or (start.boundary if start.boundary < start.round else 0)
        if boundary:
            commit = self._chain.commit(boundary)
            assert commit is not None
            start.boundary_commit.CopyFrom(await self._applies.counts(commit))

    def _replayed(self, first: int) -> list[Statement[pb.Commit]]:
        commits = (self._chain.commit(number) for number in range(first, self._chain.length))
        return [commit for commit in commits if commit is not None and not commit.body.closing]

    async def have(self, start: worker.Start, say: Callable[[str], None]) -> list[worker.Apply]:
        """Fetch what a complete start needs of the stages that are hosted here; the commits that it replays. Raises RemoteError
        when it cannot be had."""
        await self.have_frozen(say)
        providers = self.keepers(start.round)
        for state in start.states:
            if state.stage in self._hosted and not await asyncio.to_thread(self._store.sound, state.digest):
                say(f"fetching the state before round {start.round}, stage {state.stage + 1} of {len(start.states)}")
                size = state_bytes(self._manifest.model, state.stage)  # a run's author may name a blob that fills our disk
                await self._downloader.fetch(state.digest, providers, size, state.stage, NamedBy(start.round, state=True))
        replays = []
        for number in range(start.round, start.round + start.replays):
            say(f"fetching what round {number} of {self._chain.length - 1} counted")
            commit = self._chain.commit(number)
            if commit is None:
                raise RemoteError(pb.REASON_UNAVAILABLE, f"commit {number} is not on this disk yet")
            replays.append(await self._applies.take(commit))
        return replays

    async def have_frozen(self, say: Callable[[str], None]) -> None:
        """Fetch the weights that adapters are added to, of the stages that are hosted here. Raises RemoteError when they cannot be
        had, ConfigError where they are not of this model."""
        model = self._manifest.model
        if model.lora is None:
            return
        holders = [*self.keepers(0), *self._chain.head.roster]
        digests = await self.stages_of(0, model.imported, holders)
        for stage, digest in enumerate(digests):
            sizes = imported_bytes(model, stage)
            if stage in self._hosted and not await asyncio.to_thread(self._store.sound, digest):
                say(f"fetching the frozen weights, stage {stage + 1} of {len(digests)}")
                await self._downloader.fetch(digest, holders, max(sizes), stage)
            if stage in self._hosted and self._store.size(digest) not in sizes:
                raise ConfigError(
                    f"model.lora.base {model.imported.hex()} does not fit this model: its owner has to import it again"
                )

    def keepers(self, round: int) -> list[str]:
        """Return the clusters that may serve the state before a round, by their lead hosts."""
        commit = self._chain.commit(round)
        members = self._chain.head.roster if commit is None else [member.cluster for member in commit.body.roster]
        begins = [self._chain.head.coordinator] if not round else []  # it serves the imported weights, and no later state
        return [*begins, *self._manifest.run.relays, *members]

    async def stages_of(self, round: int, root: bytes, keepers: Sequence[str] | None = None) -> list[bytes]:
        """Digests of the stages of an agreed state, or of imported weights. `keepers`: who may serve it, where that does not follow
        from the round. Raises RemoteError when they cannot be had."""
        by = NamedBy(round, state=True) if keepers is None else None
        keepers = self.keepers(round) if keepers is None else keepers
        fetch = partial(self._downloader.fetch, root, keepers, limits.LEAVES_BYTES, by=by)
        digests = stages_in(await had(fetch, partial(self._store.read, root)))
        if len(digests) != self._manifest.model.stages:
            raise RemoteError(pb.REASON_WRONG_STAGES, "the state does not have the run's stages")
        return digests

    def newest_snapshot(self) -> list[bytes]:
        """Root of the newest state that joiners start from, and the stages of it that are hosted here, where they are here."""
        root = next(iter(self._agreed_snapshots().values()), b"")
        stages = self._store.stage_digests(root) if root else []
        blobs = [root, *(digest for stage, digest in enumerate(stages) if stage in self._hosted)]
        return blobs if stages and all(blob in self._store for blob in blobs) else []

    def agreed_roots(self) -> set[bytes]:
        """Return the roots of the states that joiners start from."""
        return set(self._agreed_snapshots().values())

    def oldest_kept(self) -> int:
        """Return the first round whose payloads peers store: a joiner may start from the second newest agreed snapshot."""
        newest = self._manifest.snapshot_round(max(1, self._chain.head.round))
        return max(1, newest - SNAPSHOTS_KEPT * self._manifest.rounds.snapshot_every)

    def worth_keeping(self) -> set[bytes]:
        """Return payloads and states of the rounds that a joiner or a restart may build on, from the chain. Blocking:
        reads the commits of these rounds, and their payload indexes."""
        head, oldest = self._chain.head, self.oldest_kept()
        keep: set[bytes] = set()
        model = self._manifest.model
        if model.imported and (oldest == 1 or model.lora is not None):
            keep |= {model.imported, *self._store.stage_digests(model.imported)}

        for number in range(oldest, head.round):
            commit = self._chain.commit(number)
            assert commit is not None
            for item in taken(commit.body):
                keep |= {item.contribution.leaves, *self.payloads_of(item.contribution)}
            keep.add(commit.body.state)  # a list of digests: enough to check a replay
            if self._wanted(number, head.round, oldest):
                keep |= set(self._store.stage_digests(commit.body.state))
        return keep

    def own_worth_keeping(self, states: Mapping[int, Mapping[int, bytes]], roots: Mapping[int, bytes]) -> set[bytes]:
        """Return the states of this host's workers to store: by round and stage, and their roots."""
        now, oldest = self._chain.head.round, self.oldest_kept()
        keep = {root for round, root in roots.items() if round >= oldest}
        return keep.union(*(each.values() for round, each in states.items() if self._wanted(round, now, oldest)))

    def _wanted(self, round: int, now: int, oldest: int) -> bool:
        """Return whether a peer may start from the state before the round."""
        return round >= now - RECENT_STATES or round == self._manifest.snapshot_round(round) >= oldest

    def payloads_of(self, contribution: pb.Contribution) -> list[bytes]:
        """Digests of its payloads, where its leaves are here. Blocking."""
        try:
            raw = self._store.read(contribution.leaves, limits.LEAVES_BYTES)
            return [leaf.digest for leaf in read_leaves(self._manifest, raw)]
        except (FileNotFoundError, RemoteError):  # not here, damaged, or not what it should be
            return []
