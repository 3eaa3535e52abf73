"""Checks of a contribution's payload index and payloads: the same for a voter and for `dilocox verify --replay`."""

import math
from collections.abc import Sequence

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.norms import LARGEST, TOLERANCE, matches, norm_code, norm_of
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import TensorSpec, stage_tensors
from dilocox.protocol.wire.messages import parse

__all__ = ["check_bounds", "check_leaves", "check_payload", "largest_norm", "layout_of", "read_leaves"]


def read_leaves(manifest: Manifest, raw: bytes) -> list[pb.Leaf]:
    """Raises RemoteError unless these are leaves of all stages of this run, every number inside its bounds."""
    leaves = list(parse(pb.Leaves, raw).leaves)
    if [leaf.stage for leaf in leaves] != list(range(manifest.model.stages)):
        raise RemoteError(pb.REASON_WRONG_STAGES, f"it does not announce the run's {manifest.model.stages} stages")
    for leaf in leaves:
        if len(leaf.digest) != 32 or len(leaf.norms) != len(stage_tensors(manifest.model, leaf.stage)):
            raise RemoteError(pb.REASON_MALFORMED, "an entry has no digest, or not one norm for each tensor")
        if len(leaf.shares) not in ((0,) if manifest.availability is None else (0, 32)):
            raise RemoteError(
                pb.REASON_MALFORMED,
                "the root over a payload's erasure shards is not 32 bytes, or this run stores no erasure shards",
            )
        if not 0 < leaf.size <= limits.BLOB_BYTES:
            raise RemoteError(pb.REASON_OVERSIZE, "payload size out of bounds")
    return leaves


def check_leaves(body: pb.Contribution, leaves: Sequence[pb.Leaf]) -> None:
    """Check that a contribution agrees with its payload index. Raises RemoteError."""
    if sum(leaf.size for leaf in leaves) != body.size:
        raise RemoteError(pb.REASON_SIZE_MISMATCH, "its entries do not add up to the announced bytes")
    _check_norm(body.norm, math.hypot(*(norm_of(code) for leaf in leaves for code in leaf.norms)))


def largest_norm(manifest: Manifest, spec: TensorSpec) -> float:
    """Return the largest norm of a tensor in a payload."""
    return min(LARGEST, manifest.largest_rms * math.sqrt(spec.elements))


def check_bounds(manifest: Manifest, leaf: pb.Leaf) -> None:
    """Check the bound that needs no median: for rounds of two clusters, or with many liars. Raises RemoteError."""
    for spec, code in zip(stage_tensors(manifest.model, leaf.stage), leaf.norms, strict=True):
        bound = largest_norm(manifest, spec)
        if code > min(norm_code(bound) + TOLERANCE, norm_code(LARGEST)):
            what = f"the norm of {spec.name} is {norm_of(code):.4g}"
            raise RemoteError(pb.REASON_NORM_TOO_LARGE, f"{what}; the run allows at most {bound:.4g}")


def layout_of(manifest: Manifest, stage: int, rank_or_k: int) -> wire.StageLayout:
    """Return the layout of a stage's payload in a round with this rank or k."""
    shapes = [spec.shape for spec in stage_tensors(manifest.model, stage)]
    return wire.stage_layout(shapes, manifest.compression, rank_or_k)


def check_payload(manifest: Manifest, cluster: str, round: int, leaf: pb.Leaf, raw: bytes | memoryview, rank_or_k: int) -> None:
    """Check that these bytes are the announced payload: owner, layout, finite values, size. The reader has checked their
    digest. Raises RemoteError."""
    if len(raw) != leaf.size:
        raise RemoteError(pb.REASON_SIZE_MISMATCH, "the size differs from the announced one")
    owner = wire.owner_of(manifest.run_id, cluster, round, leaf.stage)
    tensors = wire.parse(raw, layout_of(manifest, leaf.stage, rank_or_k), owner)
    for code, tensor in zip(leaf.norms, tensors, strict=True):
        _check_norm(code, wire.decoded_norm([tensor]))


def _check_norm(code: int, norm: float) -> None:
    if not matches(code, norm):
        raise RemoteError(pb.REASON_NORM_MISMATCH, f"its norm is {norm:.4g}, announced {norm_of(code):.4g}")
