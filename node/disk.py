"""What a run takes of a box's disk: what lies there at most, and what each round writes. Bytes, by arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.node.clock import model_payload_bytes
from dilocox.node.memory import stage_bytes
from dilocox.node.starts import BOUNDARIES_KEPT, RECENT_STATES, SNAPSHOTS_KEPT
from dilocox.protocol import auditing
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.tensors import imported_bytes, phase_bytes, state_bytes

__all__ = ["Written", "disk_bytes", "held_bytes", "written"]


@dataclass(frozen=True)
class Written:
    """By a box, for one round."""

    boundary: int
    """Error feedback."""
    complete: int
    """What a complete boundary has beside it: anchor, and the inner optimizer's tensors."""
    payload: int
    """Its own."""
    others: int
    """Their payloads, as they arrive."""
    state: int
    """Θ and momentum, once committed."""
    marks: int
    """States of its phase, by which it may be audited, while it trains."""

    @property
    def waited_for(self) -> int:
        """By the exchange, in a round whose boundary is complete: no payload is announced, and no commit applied, before these are
        on the disk."""
        return self.boundary + self.complete + self.payload + self.state

    def each(self, checkpoint_every: int) -> float:
        """In all, in the mean of rounds of which every so manieth has a complete boundary."""
        return self.boundary + self.complete / checkpoint_every + self.payload + self.others + self.state + self.marks


def written(manifest: Manifest, clusters: int, stages: Sequence[int] | None = None) -> Written:
    """By a box with these stages (default: all), where so many clusters exchange. Headers and the codec's warm starts are left
    out."""
    model = manifest.model
    mine = range(model.stages) if stages is None else stages
    held = stage_bytes(manifest, mine, half=False)
    states = sum(state_bytes(model, stage) for stage in mine)
    payload = round(model_payload_bytes(model, manifest.compression, mine))
    phases = sum(phase_bytes(model, manifest.training.optimizer == "muon", stage) for stage in mine)
    marks = (manifest.audit.segments + 1) * phases if manifest.audit.segments else 0
    return Written(held.gradients, held.gradients + held.moments, payload, (clusters - 1) * payload, states, marks)


def disk_bytes(manifest: Manifest, clusters: int) -> int:
    """That a box which holds all stages fills at most, beside data and chain: states that it keeps (with one that arrives),
    boundaries (with one that is being written), states of phases that may be audited, weights that adapters are added to, and the
    payloads of so many clusters until two later snapshots are agreed."""
    each = written(manifest, clusters)
    boundaries = (BOUNDARIES_KEPT + 1) * (each.boundary + each.complete)
    return held_bytes(manifest, clusters) + boundaries + (auditing.WAIT + 2) * each.marks


def held_bytes(manifest: Manifest, clusters: int) -> int:
    """That who keeps for others fills at most, beside data and chain: the same without boundaries and phases."""
    model, stages = manifest.model, range(manifest.model.stages)
    states = (SNAPSHOTS_KEPT + RECENT_STATES + 1) * sum(state_bytes(model, stage) for stage in stages)
    payload = model_payload_bytes(model, manifest.compression)
    rounds = (SNAPSHOTS_KEPT + 1) * manifest.rounds.snapshot_every
    frozen = sum(max(imported_bytes(model, stage)) for stage in stages) if model.lora is not None else 0
    return int(states + frozen + clusters * rounds * payload)
