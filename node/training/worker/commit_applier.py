"""A worker's side of the chain: commits into Θ, its digests, and what a recheck replays."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.node.outer.state import StageState
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.protocol.consensus.head import Head, advance
from dilocox.protocol.errors import LocalError
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import PhaseState
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.store.blobs import BlobStore, digest_of

__all__ = ["Commits", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """Commit that is applied to Θ; all ranks move onto it at one turn."""

    commit: Commit
    head: Head
    digests: list[pb.StageState]


@dataclass(frozen=True)
class Last:
    """The newest commit that was applied."""

    before: list[pb.StageState]
    commit: Commit


class Commits:
    def __init__(self, manifest: Manifest, trainer: Trainer, store: BlobStore) -> None:
        self._manifest, self._trainer, self._store = manifest, trainer, store
        self.digests: list[pb.StageState] = []
        """Digests of Θ(head), by stage of this worker."""
        self.payloads: dict[int, bytes] = {}
        """Digests of our payloads in flight, by stage; of no meaning when none is (PhaseState.in_flight)."""
        self.last: Last | None = None

    def open(self, raw: bytes) -> Statement:
        return open_envelope(raw, self._manifest.run_id, (wire.KIND_COMMIT,))

    def store_states(self) -> list[pb.StageState]:
        """Store Θ and momentum as blobs, and return their digests, by stage. Waits for no disk: a checkpoint does."""
        return [
            pb.StageState(stage=state.stage, digest=self._store.put([state.state_bytes()], waits=False))
            for state in self._trainer.states
        ]

    def prepare(self, state: PhaseState, arrived: pb.Apply) -> Prepared:
        """Apply a commit to Θ, momentum and error feedback, and write state blobs. Runs in the background; does not touch
        live parameters."""
        commit = self.open(arrived.commit)
        body: wire.Commit = commit.body
        if body.round != state.head.round:
            raise LocalError(f"commit {body.round} does not follow the state before round {state.head.round}")
        read = read_commit(body.round, arrived.takes, state.head.rank_or_k)
        announced = self.payloads if phase.closes(state, read.round) else {}
        self._trainer.prepare(read, self._store.view, state.cluster, announced)
        digests = self.store_states() if body.counted else self.digests
        return Prepared(read, advance(self._manifest, commit), digests)

    def finish(self, prepared: Prepared, keep_private: bool) -> None:
        """The live parameters move onto Θ."""
        self.last = Last(self.digests, prepared.commit)
        self.digests = prepared.digests
        self._trainer.rebase(keep_private)

    def recheck(self, round: int, last: Last, reported: list[pb.StageState]) -> pb.Rechecked:
        """Return the last commit's result on the state from disk, in the background. It shows memory errors."""
        digests = []
        for item in last.before:
            replayed = StageState(self._manifest, item.stage)
            view = self._store.view(item.digest)
            if digest_of([view]) != item.digest:
                raise LocalError(f"the state before round {round - 1} rotted on disk")
            replayed.load_state(view)
            last.commit.apply_to(replayed, self._store.view)
            digests.append(pb.StageState(stage=item.stage, digest=digest_of([replayed.state_bytes()])))
        return pb.Rechecked(round=round, states=digests, report_agrees=digests == reported)

    def return_payload(self, stage: int, payload: bytes, closed: Commit, cluster: str) -> None:
        """Return the fraction of our payload that the commit did not apply to the error feedback."""
        for state in self._trainer.states:
            if state.stage == stage:
                left = closed.leaves(cluster, stage, len(state.specs), payload)
                state.return_to_feedback(self._store.view(payload), closed.rank_or_k, left)


def read_commit(round: int, takes: Sequence[pb.Take], rank_or_k: int) -> Commit:
    """`rank_or_k`: of the round that it closes."""
    read = [Take(take.cluster, take.weight, list(take.payloads), take.clip, list(take.clips)) for take in takes]
    return Commit(round, rank_or_k, read)
