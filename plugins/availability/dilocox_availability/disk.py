"""Disk that a run's erasure shards take, in bytes."""

from collections.abc import Sequence

from dilocox.node.planning.time_model import model_payload_bytes
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import state_bytes
from dilocox_availability.shards import Code, Held, code_of, counted_room, worth_keeping

__all__ = ["rounds_shared", "shard_bytes", "state_is_shared"]


def _code(manifest: Manifest, clusters: int) -> Code | None:
    """Return how so many clusters share, each of which hosts all stages. None: they do not."""
    settings = manifest.availability
    return None if settings is None else code_of(clusters, settings.needed_share)


def shard_bytes(manifest: Manifest, clusters: int, stages: Sequence[int]) -> float:
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
    """Return for how many rounds a peer with all stages has space for its shards of all contributions, whatever states it
    has shards of beside them. 0: for none, or it shares with no peer."""
    settings, code = manifest.availability, _code(manifest, clusters)
    if settings is None or code is None:
        return 0
    each = clusters * code.share_size(round(model_payload_bytes(manifest.model, manifest.compression)))
    return min(settings.rounds, counted_room(settings.most_bytes) // each)


def state_is_shared(manifest: Manifest, clusters: int) -> bool:
    """Return whether there is space for a peer's shard of a state, beside any counted blobs."""
    settings, code = manifest.availability, _code(manifest, clusters)
    states = sum(state_bytes(manifest.model, stage) for stage in range(manifest.model.stages))
    return bool(settings and code and code.share_size(states) <= settings.most_bytes - counted_room(settings.most_bytes))
