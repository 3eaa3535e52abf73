"""Resume of a worker: its offer, the daemon's choice, and the replay of commits on it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.commit_applier import Commits, read_commit
from dilocox.node.workers.audit_checkpoints import merged
from dilocox.node.workers.phase_id import phase_of
from dilocox.protocol.consensus.head import Head, advance, initial_head
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import PhaseState
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore

__all__ = ["Resume", "boundary_event"]


class Resume:
    def __init__(
        self, manifest: Manifest, cluster: str, folder: Path, trainer: Trainer, commits: Commits, store: BlobStore
    ) -> None:
        """`folder`: of the boundary checkpoints."""
        self._manifest, self._cluster, self._folder = manifest, cluster, folder
        self._trainer, self._commits, self._store = trainer, commits, store

    def offers(self) -> list[pb.Boundary]:
        """Boundaries of this worker's stages, the oldest first, each with those that have it: of one phase."""
        found = {stage: checkpoint.boundaries(self._folder, stage) for stage in self._trainer.stages}
        offers = []
        for round in sorted({round for rounds in found.values() for round in rounds}):
            metas = {stage: rounds[round] for stage, rounds in found.items() if round in rounds}
            phases = {stage: phase_of(boundary_event({stage: meta})) for stage, meta in metas.items()}
            last = max(metas, key=lambda stage: metas[stage].samples_read)
            offers.append(boundary_event({stage: meta for stage, meta in metas.items() if phases[stage] == phases[last]}))
        return offers

    def load(self, start: pb.Start, next_command: Callable[[], pb.WorkerCommand]) -> PhaseState | None:
        """Load the daemon's choice, and apply the later commits as they arrive; return None on a stop command."""
        self._trainer.load_frozen(self._store)
        head = initial_head("")
        if start.opening_commit:
            head = advance(self._manifest, self._commits.open(start.opening_commit))
        self._load_committed(start)
        state = phase.begin(self._manifest, self._cluster, head)
        if start.origin == pb.Start.ORIGIN_BOUNDARY:
            state = self._load_boundary(start, head)
        elif start.HasField("kept"):
            self._load_kept(start)
        for _ in range(start.replays):
            while (command := next_command()).HasField("recheck"):
                pass  # what is being replayed needs no second look
            if command.HasField("stop"):
                return None
            prepared = self._commits.prepare(state, command.apply)
            self._commits.finish(prepared, keep_private=True)  # where a phase starts there is none
            state = phase.onto(state, prepared.head)
        if start.origin == pb.Start.ORIGIN_SNAPSHOT and not start.HasField("kept"):  # as old as the run, where it is the first
            self._trainer.optimizer.steps = self._manifest.nominal_steps(state.head.trained + 1)
        return state

    def _load_committed(self, start: pb.Start) -> None:
        if start.origin == pb.Start.ORIGIN_INITIAL:
            self._trainer.load_initial()
            self._commits.digests = self._commits.store_states()
            return
        wanted = {item.stage: item for item in start.states}
        for state in self._trainer.states:
            state.load_state(self._store.view(wanted[state.stage].digest))
        self._commits.digests = [wanted[state.stage] for state in self._trainer.states]
        self._trainer.reset_to_committed()

    def _load_boundary(self, start: pb.Start, head: Head) -> PhaseState:
        """Load the private state. If Θ is newer, only the inner optimizer and unsent or uncounted work are used."""
        metas = self._metas(start.boundary, self._trainer.stages)
        self._load_stages(start.boundary, metas)
        meta = next(iter(metas.values()))
        self._trainer.optimizer.steps = meta.optimizer_steps
        self._commits.payloads = {stage: bytes.fromhex(item.payload) for stage, item in metas.items()}
        if start.boundary < start.round:
            self._put_back(start, metas)
        return phase.resume(self._manifest, self._cluster, head, start.boundary, meta.samples_read, meta.joined)

    def _load_kept(self, start: pb.Start) -> None:
        """Load stages that were here in the cluster's last phase without their private progress; stages that moved here
        begin without any. All take the same inner steps."""
        stages = {payload.stage for payload in start.kept.payloads} & set(self._trainer.stages)
        metas = self._metas(start.kept.round, stages)
        self._load_stages(start.kept.round, metas)
        self._trainer.optimizer.steps = start.kept.optimizer_steps
        self._put_back(start, metas)

    def _load_stages(self, boundary: int, metas: Mapping[int, BoundaryMeta]) -> None:
        for number, stage in self._trainer.live_stages():
            if number in metas:
                self._trainer.load_inner(stage, checkpoint.load_inner(self._folder, number, boundary))
        for state in self._trainer.states:
            if state.stage in metas:
                checkpoint.load_outer(self._folder, state, boundary)
        self._trainer.resume_live()

    def _put_back(self, start: pb.Start, metas: Mapping[int, BoundaryMeta]) -> None:
        """Load onto Θ, which is newer than a checkpoint; fractions that its commit did not apply return to the error
        feedback."""
        self._trainer.reset_to_committed()
        for stage, meta in metas.items():
            closed = read_commit(meta.round, start.boundary_commit.takes, meta.rank_or_k)
            self._commits.return_payload(stage, bytes.fromhex(meta.payload), closed, self._cluster)

    def announcement(self, boundary: int) -> pb.Boundary:
        """Return the announcement of a checkpoint whose payloads are in flight: the same bytes again."""
        return boundary_event(self._metas(boundary, self._trainer.stages))

    def _metas(self, boundary: int, stages: Iterable[int]) -> dict[int, BoundaryMeta]:
        return {stage: checkpoint.boundaries(self._folder, stage)[boundary] for stage in stages}


def boundary_event(metas: dict[int, BoundaryMeta]) -> pb.Boundary:
    """Return the announcement, from the checkpoints of one worker's stages."""
    meta = next(iter(metas.values()))
    return pb.Boundary(
        round=meta.round,
        inner_steps=meta.inner_steps,
        tokens=meta.tokens,
        loss=meta.loss,
        samples_read=meta.samples_read,
        head=bytes.fromhex(meta.head),
        optimizer_steps=meta.optimizer_steps,
        steps_within=meta.steps_within or meta.inner_steps,  # of an earlier version
        noise=meta.noise,
        corpus=bytes.fromhex(meta.corpus),
        complete=all(item.complete for item in metas.values()),
        marks=merged(([stage], wire.Marks.FromString(bytes.fromhex(item.marks))) for stage, item in sorted(metas.items()))
        if meta.marks
        else None,
        payloads=[
            pb.StagePayload(
                stage=stage,
                base_state=bytes.fromhex(item.base_state),
                digest=bytes.fromhex(item.payload),
                size=item.payload_size,
                norm=item.norm,
                effective_rank=item.effective_rank,
                error=item.error,
                norms=bytes.fromhex(item.norms),
            )
            for stage, item in sorted(metas.items())
        ],
    )
