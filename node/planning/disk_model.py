"""Disk model: space that a run takes on a host, and bytes written per round. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilocox.node.planning.memory_model import stage_bytes
from dilocox.node.planning.time_model import model_payload_bytes
from dilocox.node.state.resume_points import BOUNDARIES_KEPT, COMPLETE_KEPT, RECENT_STATES, SNAPSHOTS_KEPT
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import imported_bytes, state_bytes

if TYPE_CHECKING:
    from dilocox.node.exchange.shards import Shards

__all__ = ["Written", "disk_bytes", "held_bytes", "written"]


@dataclass(frozen=True)
class Written:
    """Bytes written by a host in one round."""

    boundary: int
    """Error feedback."""
    anchor_and_moments: int
    """Additional bytes of a complete checkpoint; `--checkpoint-seconds` decides how many are complete."""
    payload: int
    """Bytes of its payload."""
    others: int
    """Their payloads, as they arrive."""
    state: int
    """Θ and momentum, once committed."""
    mark: int
    """A state of its phase by which it may be audited; 0: the run does not audit."""
    marks: int
    """So many are written; the last one before anything is announced."""
    audited: float
    """Mean bytes of states fetched for audits."""
    shards: float
    """Mean bytes of erasure shards."""

    @property
    def for_others(self) -> float:
        return self.audited + self.shards

    def in_a_round(self, seconds: float, checkpoint_seconds: float) -> float:
        """Return the mean bytes of rounds that last so long, with a complete checkpoint every `checkpoint_seconds`."""
        always = self.boundary + self.payload + self.others + self.state + self.mark * self.marks + self.for_others
        return always + self.anchor_and_moments * (min(1.0, seconds / checkpoint_seconds) if checkpoint_seconds else 1.0)


def written(
    manifest: Manifest,
    clusters: int,
    stages: Sequence[int] | None = None,
    leads: bool = True,
    shards: "Shards | None" = None,
) -> Written:
    """Return the bytes of a host with these stages (default: all), in a round of H steps with so many clusters.

    `leads`: it is the lead host, which audits. `shards`: of the run, if they can be made here. Omitted: headers, lists, and the
    codec's warm starts."""
    model = manifest.model
    mine = range(model.stages) if stages is None else stages
    held = stage_bytes(manifest, mine, half=False)
    states = sum(state_bytes(model, stage) for stage in mine)
    payload = round(model_payload_bytes(model, manifest.compression, mine))
    mark, marks, audited = _for_audits(manifest, clusters, mine, leads)
    return Written(
        boundary=held.gradients,
        anchor_and_moments=held.gradients + held.moments,
        payload=payload,
        others=(clusters - 1) * payload,
        state=states,
        mark=mark,
        marks=marks,
        audited=audited,
        shards=shards.bytes_a_round(clusters, mine) if shards is not None else 0.0,
    )


def _for_audits(manifest: Manifest, clusters: int, stages: Sequence[int], leads: bool) -> tuple[int, int, float]:
    """Return `mark`, `marks` and `audited` of what is written. A run without audits imports no module of theirs."""
    if not manifest.audit.segments:
        return 0, 0, 0.0
    from dilocox.node.planning import audit_disk_model as of

    mark = sum(of.phase(manifest, stage) for stage in stages)
    marks = of.marks(manifest, manifest.rounds.inner_steps)
    whole = sum(of.phase(manifest, stage) for stage in range(manifest.model.stages))
    audited = of.audits(manifest, clusters) * 2 * whole if leads else 0.0
    return mark, marks, audited


def disk_bytes(manifest: Manifest, clusters: int) -> int:
    """Return the most bytes of a host with all stages, beside data and chain.

    These are stored states (with one arriving), checkpoints (with a complete one being written) and the states that they
    begin from, states for audits, weights under adapters, payloads of all clusters until two later snapshots are agreed,
    and shards. The auditor checks its own space."""
    each = written(manifest, clusters)
    complete = (COMPLETE_KEPT + 1) * (each.boundary + each.anchor_and_moments) + COMPLETE_KEPT * each.state
    boundaries = BOUNDARIES_KEPT * each.boundary + complete
    shards = manifest.availability.most_bytes if manifest.availability is not None else 0
    return held_bytes(manifest, clusters) + boundaries + _marks_bytes(manifest, each.mark) + shards


def _marks_bytes(manifest: Manifest, mark: int) -> int:
    """Return the bytes of the states of phases by which this host may be audited."""
    if not manifest.audit.segments:
        return 0
    from dilocox.node.planning import audit_disk_model as of

    return of.ROUNDS_OF_MARKS * mark * of.marks(manifest, manifest.rounds.max_inner_steps)


def held_bytes(manifest: Manifest, clusters: int) -> int:
    """Return the most bytes of a relay, beside data and chain: the same without checkpoints and phases."""
    model, stages = manifest.model, range(manifest.model.stages)
    states = (SNAPSHOTS_KEPT + RECENT_STATES + 1) * sum(state_bytes(model, stage) for stage in stages)
    payload = model_payload_bytes(model, manifest.compression)
    rounds = (SNAPSHOTS_KEPT + 1) * manifest.rounds.snapshot_every
    frozen = sum(max(imported_bytes(model, stage)) for stage in stages) if model.lora is not None else 0
    return int(states + frozen + clusters * rounds * payload)
