"""Disk that a run's audits and availability take, in bytes."""

from collections.abc import Sequence

from dilocox.node.clock import model_payload_bytes
from dilocox.protocol import auditing, limits
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.shares import Code, Held, code_of, counted_room, worth_keeping
from dilocox.protocol.tensors import phase_bytes, state_bytes

__all__ = ["ROUNDS_OF_MARKS", "audits", "marks", "phase", "rounds_shared", "shares", "state_is_shared"]

ROUNDS_OF_MARKS = auditing.WAIT + 2
"""Rounds whose states are stored at once: those that auditors may request, the open one, and the one that is written."""


def phase(manifest: Manifest, stage: int) -> int:
    """Return the bytes of a state by which a phase is audited, of one stage."""
    return phase_bytes(manifest.model, manifest.training.optimizer == "muon", stage)


def marks(manifest: Manifest, steps: int) -> int:
    """Return how many states a phase of so many steps stores: where each of its stretches begins, before a commit and after it, and
    at its end."""
    return -(-steps // auditing.spacing(manifest)) + 2 + auditing.JUMPS


def audits(manifest: Manifest, clusters: int) -> float:
    """Return the mean audits a round for which a cluster is drawn, where all have the same voting weight and are counted. A
    committee of fewer than there are others may draw one of them twice."""
    rules, others = manifest.audit, clusters - 1
    if not rules.segments or not others:
        return 0.0
    drawn = others if others <= auditing.AUDITORS else others * (1 - (1 - 1 / others) ** auditing.AUDITORS)
    return float(min(limits.AUDITS, rules.share * clusters)) * drawn / clusters


def _code(manifest: Manifest, clusters: int) -> Code | None:
    """Return how so many clusters share, each of which hosts all stages. None: they do not."""
    settings = manifest.availability
    return None if settings is None else code_of(clusters, settings.needed_share)


def shares(manifest: Manifest, clusters: int, stages: Sequence[int]) -> float:
    """Return the mean bytes of shards a round of these stages: one of each cluster's payload, and one of the state in a round from
    which joiners start, as far as the run lets a peer store them."""
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
    """Return for how many rounds a peer that hosts all stages has room for its shards of what so many clusters contribute, whatever
    states it has shards of beside them. 0: for none, or it shares with no peer."""
    settings, code = manifest.availability, _code(manifest, clusters)
    if settings is None or code is None:
        return 0
    each = clusters * code.share_size(round(model_payload_bytes(manifest.model, manifest.compression)))
    return min(settings.rounds, counted_room(settings.most_bytes) // each)


def state_is_shared(manifest: Manifest, clusters: int) -> bool:
    """Return whether there is room for a peer's shard of a state, whatever was counted beside it."""
    settings, code = manifest.availability, _code(manifest, clusters)
    states = sum(state_bytes(manifest.model, stage) for stage in range(manifest.model.stages))
    return bool(settings and code and code.share_size(states) <= settings.most_bytes - counted_room(settings.most_bytes))
