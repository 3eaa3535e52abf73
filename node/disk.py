"""What a run takes of a box's disk: what lies there at most, and what each round writes. Bytes, by arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

from dilocox.node.clock import model_payload_bytes
from dilocox.node.memory import stage_bytes
from dilocox.node.starts import BOUNDARIES_KEPT, RECENT_STATES, SNAPSHOTS_KEPT
from dilocox.protocol import auditing, limits
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.shares import Code, Held, code_of, counted_room, worth_keeping
from dilocox.protocol.tensors import imported_bytes, phase_bytes, state_bytes

__all__ = ["Written", "disk_bytes", "held_bytes", "rounds_shared", "state_is_shared", "written"]


@dataclass(frozen=True)
class Written:
    """By a box, for one round."""

    boundary: int
    """Error feedback."""
    anchor_and_moments: int
    """What a complete boundary has beside it; `--checkpoint-every` says how many have."""
    payload: int
    """Its own."""
    others: int
    """Their payloads, as they arrive."""
    state: int
    """Θ and momentum, once committed."""
    mark: int
    """A state of its phase by which it may be audited; 0: the run does not audit."""
    marks: int
    """So many are written; the last one before anything is announced."""
    audited: float
    """In the mean: states of others' phases, fetched to train a stretch of them again."""
    shares: float
    """In the mean: of what commits name, kept for when others are gone."""

    @property
    def for_others(self) -> float:
        return self.audited + self.shares

    @property
    def waited_for(self) -> int:
        """By the exchange, in a round whose boundary is complete: no payload is announced, and no commit applied, before these are
        on the disk."""
        return self.mark + self.boundary + self.anchor_and_moments + self.payload + self.state

    def in_a_round(self, checkpoint_every: int) -> float:
        """In all, in the mean of rounds of which one in so many has a complete boundary."""
        always = self.boundary + self.payload + self.others + self.state + self.mark * self.marks + self.for_others
        return always + self.anchor_and_moments / checkpoint_every


def written(manifest: Manifest, clusters: int, stages: Sequence[int] | None = None, leads: bool = True) -> Written:
    """By a box with these stages (default: all), where so many clusters exchange, in a round of H steps. `leads`: it is its
    cluster's first, which audits. Headers, lists and the codec's warm starts are left out."""
    model, everything = manifest.model, range(manifest.model.stages)
    mine = everything if stages is None else stages
    held = stage_bytes(manifest, mine, half=False)
    states = sum(state_bytes(model, stage) for stage in mine)
    payload = round(model_payload_bytes(model, manifest.compression, mine))
    phases = sum(_phase(manifest, stage) for stage in mine)
    audits = manifest.audit.segments > 0
    return Written(
        boundary=held.gradients,
        anchor_and_moments=held.gradients + held.moments,
        payload=payload,
        others=(clusters - 1) * payload,
        state=states,
        mark=phases if audits else 0,
        marks=_marks(manifest, manifest.rounds.inner_steps) if audits else 0,
        audited=_audits(manifest, clusters) * 2 * sum(_phase(manifest, stage) for stage in everything) if leads else 0.0,
        shares=_shares(manifest, clusters, mine),
    )


def _phase(manifest: Manifest, stage: int) -> int:
    return phase_bytes(manifest.model, manifest.training.optimizer == "muon", stage)


def _audits(manifest: Manifest, clusters: int) -> float:
    """For which a cluster is drawn in a round, in the mean, where all stand equal and are counted. A committee of fewer than there
    are others may draw one of them twice."""
    rules, others = manifest.audit, clusters - 1
    if not rules.segments or not others:
        return 0.0
    drawn = others if others <= auditing.AUDITORS else others * (1 - (1 - 1 / others) ** auditing.AUDITORS)
    return float(min(limits.AUDITS, rules.share * clusters)) * drawn / clusters


def _code(manifest: Manifest, clusters: int) -> Code | None:
    """As so many clusters share, each of which hosts all stages. None: they do not."""
    settings = manifest.availability
    return None if settings is None else code_of(clusters, settings.needed_share)


def _shares(manifest: Manifest, clusters: int, stages: Sequence[int]) -> float:
    """Of these stages: one of each cluster's payload, and of the state in a round from which joiners start, as far as the run lets
    a peer keep them."""
    settings, every, code = manifest.availability, manifest.rounds.snapshot_every, _code(manifest, clusters)
    if settings is None or code is None:
        return 0.0
    rounds, most = settings.rounds, settings.most_bytes
    payloads = [round(model_payload_bytes(manifest.model, manifest.compression, [stage])) for stage in stages] * clusters
    states = [state_bytes(manifest.model, stage) for stage in stages]

    def kept(states: Sequence[int]) -> int:
        blobs = [*((True, size) for size in states), *((False, size) for size in payloads)]
        made = [Held(1, state, code.share_size(size), b"%d" % number) for number, (state, size) in enumerate(blobs)]
        names = worth_keeping(made, 2, rounds, most)
        return sum(share.size for share in made if share.blob in names)

    return ((every - 1) * kept(()) + kept(states)) / every


def rounds_shared(manifest: Manifest, clusters: int) -> int:
    """For how many rounds whoever hosts all stages has room for its shares of what so many clusters contribute, whatever states it
    keeps shares of beside them. 0: for none, or it shares with nobody."""
    settings, code = manifest.availability, _code(manifest, clusters)
    if settings is None or code is None:
        return 0
    each = clusters * code.share_size(round(model_payload_bytes(manifest.model, manifest.compression)))
    return min(settings.rounds, counted_room(settings.most_bytes) // each)


def state_is_shared(manifest: Manifest, clusters: int) -> bool:
    """Whether there is room for its share of a state, whatever was counted beside it."""
    settings, code = manifest.availability, _code(manifest, clusters)
    states = sum(state_bytes(manifest.model, stage) for stage in range(manifest.model.stages))
    return bool(settings and code and code.share_size(states) <= settings.most_bytes - counted_room(settings.most_bytes))


def _marks(manifest: Manifest, steps: int) -> int:
    """Of a phase of so many: where each of its stretches begins, before a commit and after it, at its end."""
    return -(-steps // auditing.spacing(manifest)) + 2 + auditing.JUMPS


def disk_bytes(manifest: Manifest, clusters: int) -> int:
    """That a box which holds all stages fills at most, beside data and chain: states that it keeps (with one that arrives),
    boundaries (with one that is being written), states of phases that may be audited, weights that adapters are added to, the
    payloads of so many clusters until two later snapshots are agreed, and shares. Who audits looks for room itself."""
    each = written(manifest, clusters)
    boundaries = (BOUNDARIES_KEPT + 1) * (each.boundary + each.anchor_and_moments)
    marks = each.mark * _marks(manifest, manifest.rounds.max_inner_steps) if each.mark else 0
    shares = manifest.availability.most_bytes if manifest.availability is not None else 0
    return held_bytes(manifest, clusters) + boundaries + (auditing.WAIT + 2) * marks + shares


def held_bytes(manifest: Manifest, clusters: int) -> int:
    """That who keeps for others fills at most, beside data and chain: the same without boundaries and phases."""
    model, stages = manifest.model, range(manifest.model.stages)
    states = (SNAPSHOTS_KEPT + RECENT_STATES + 1) * sum(state_bytes(model, stage) for stage in stages)
    payload = model_payload_bytes(model, manifest.compression)
    rounds = (SNAPSHOTS_KEPT + 1) * manifest.rounds.snapshot_every
    frozen = sum(max(imported_bytes(model, stage)) for stage in stages) if model.lora is not None else 0
    return int(states + frozen + clusters * rounds * payload)
