"""Tests of a contribution's other announcements, which are checked before any byte of its payloads is fetched."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.exchange.downloader import Downloader
from dilocox.protocol import limits
from dilocox.protocol.consensus.head import Cluster, HostRange
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.norms import TOLERANCE, norm_code, norm_of
from dilocox.protocol.payload.payload_index import largest_norm, read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.messages import canonical, seal
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.blobs import BlobStore
from tests.exchanges import Nobody, exchange_of
from tests.helpers import digest, identity, manifest

RUN = manifest()
TENSORS = [len(stage_tensors(RUN.model, stage)) for stage in range(RUN.model.stages)]
CODE = norm_code(0.01)


def good() -> pb.Leaves:
    return pb.Leaves(
        leaves=[
            pb.Leaf(stage=stage, digest=digest(stage), size=100, norms=bytes([CODE] * tensors))
            for stage, tensors in enumerate(TENSORS)
        ]
    )


def test_good_leaves_are_read_stage_by_stage():
    assert [(leaf.stage, leaf.size) for leaf in read_leaves(RUN, canonical(good()))] == [(0, 100), (1, 100)]


Spoil = Callable[[pb.Leaves], object]
SPOILED: dict[str, tuple[Spoil, pb.Reason]] = {
    "a stage is missing": (lambda leaves: leaves.leaves.pop(), pb.REASON_WRONG_STAGES),
    "a stage twice": (lambda leaves: leaves.leaves.append(leaves.leaves[1]), pb.REASON_WRONG_STAGES),
    "another order": (lambda leaves: leaves.leaves.reverse(), pb.REASON_WRONG_STAGES),
    "a stage that is not the run's": (lambda leaves: setattr(leaves.leaves[1], "stage", 2), pb.REASON_WRONG_STAGES),
    "no digest": (lambda leaves: leaves.leaves[0].ClearField("digest"), pb.REASON_MALFORMED),
    "half a digest": (lambda leaves: setattr(leaves.leaves[0], "digest", bytes(16)), pb.REASON_MALFORMED),
    "a norm too few": (lambda leaves: setattr(leaves.leaves[0], "norms", bytes(TENSORS[0] - 1)), pb.REASON_MALFORMED),
    "a norm too many": (lambda leaves: setattr(leaves.leaves[1], "norms", bytes(TENSORS[1] + 1)), pb.REASON_MALFORMED),
    "no bytes": (lambda leaves: setattr(leaves.leaves[0], "size", 0), pb.REASON_OVERSIZE),
    "too many bytes": (lambda leaves: setattr(leaves.leaves[0], "size", limits.BLOB_BYTES + 1), pb.REASON_OVERSIZE),
    "nothing": (lambda leaves: leaves.Clear(), pb.REASON_WRONG_STAGES),
}


@pytest.mark.parametrize("name", SPOILED)
def test_bad_leaves_are_refused_with_their_reasons(name: str):
    spoil, reason = SPOILED[name]
    leaves = good()
    spoil(leaves)
    with pytest.raises(RemoteError) as refused:
        read_leaves(RUN, canonical(leaves))
    assert refused.value.reason == reason


@pytest.mark.parametrize("raw", [b"\xff", canonical(good()) + b"\x18\x01", b"\x0a\x02"])
def test_bytes_that_are_not_leaves_are_refused(raw: bytes):
    with pytest.raises(RemoteError) as refused:
        read_leaves(RUN, raw)
    assert refused.value.reason == pb.REASON_MALFORMED


def announced(store: BlobStore, leaves: pb.Leaves, **changes: int) -> pb.Contribution:
    """Return a contribution whose payload index is in the store; `changes` are fields that contradict the index."""
    total = math.hypot(*(norm_of(code) for leaf in leaves.leaves for code in leaf.norms))
    said: dict[str, Any] = {"norm": norm_code(total), "size": sum(leaf.size for leaf in leaves.leaves), **changes}
    return pb.Contribution(round=3, base_state=digest("base"), leaves=store.put([canonical(leaves)]), **said)


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        ("another base", {}, pb.REASON_WRONG_BASE),
        ("base", {"size": 201}, pb.REASON_SIZE_MISMATCH),
        ("base", {"norm": 200}, pb.REASON_NORM_MISMATCH),
        ("base", {}, pb.REASON_SIZE_MISMATCH),  # of a payload: 100 bytes are none of this layout
    ],
)
async def test_a_contribution_is_judged_before_its_payloads_are_fetched(
    tmp_path: Path, base: str, changes: dict[str, int], reason: pb.Reason
):
    store = BlobStore(tmp_path)
    exchange = exchange_of(RUN, Downloader(identity(1).peer, store, Nobody(), ChannelPool()))
    statement = seal(identity(2), pb.KIND_CONTRIBUTION, RUN.run_id, announced(store, good(), **changes))
    assert (await exchange.checker.judge(statement, digest(base), RUN.compression.keep))[0] == reason
    statistics = exchange.downloader.statistics()
    assert statistics.fetches == statistics.failures == 0


@pytest.mark.parametrize(
    ("above", "verdict"), [(0, (pb.REASON_UNSPECIFIED, 0)), (1, (pb.REASON_NORM_TOO_LARGE, 1))], ids=["at the bound", "above"]
)
async def test_judge_tensor_above_largest_rms_is_rejected(tmp_path: Path, above: int, verdict: tuple[int, int]):
    """Check a voter without stages: it has only the payload index, and enforces the bound all the same."""
    store, leaves = BlobStore(tmp_path), good()
    spec = stage_tensors(RUN.model, 1)[0]
    norms = bytearray(leaves.leaves[1].norms)
    norms[0] = norm_code(largest_norm(RUN, spec)) + TOLERANCE + above
    leaves.leaves[1].norms = bytes(norms)
    exchange = exchange_of(RUN, Downloader(identity(1).peer, store, Nobody(), ChannelPool()), ())
    statement = seal(identity(2), pb.KIND_CONTRIBUTION, RUN.run_id, announced(store, leaves))
    assert await exchange.checker.judge(statement, digest("base"), RUN.compression.keep) == verdict


class Asked:
    """Exchange that finds no peer, and notes the requested peers."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    async def find(self, peer: str) -> None:
        self._asked.append(peer)

    async def look_up(self, peer: str) -> None:
        pass


async def test_a_cluster_of_many_boxes_is_asked_no_sooner_than_one_of_one(tmp_path: Path):
    """Check the order; otherwise one seat of an unknown peer would be most of the peers that a joiner asks."""
    lead, *boxes = (identity(number).peer for number in range(20))
    others = [identity(number).peer for number in (30, 31)]
    hosts = tuple(HostRange(peer, 0, 2, copy) for copy, peer in enumerate([lead, *boxes]))
    roster = {lead: Cluster(lead, hosts, 1), **{peer: Cluster(peer, (HostRange(peer, 0, 2),), 1) for peer in others}}
    asked: list[str] = []
    downloader = Downloader("me", BlobStore(tmp_path), Asked(asked), ChannelPool(), lambda: roster)
    with pytest.raises(RemoteError):
        await downloader.fetch(bytes(32), [lead, *others], stage=1)
    assert set(others) < set(asked[:3])
    assert sorted(asked) == sorted([lead, *boxes, *others]), "each is asked in the end"


async def test_of_a_cluster_the_box_that_hosts_a_stage_is_asked_first_and_its_lead_for_what_is_of_no_stage(tmp_path: Path):
    lead, box = identity(0).peer, identity(1).peer
    roster = {lead: Cluster(lead, (HostRange(lead, 0, 1), HostRange(box, 1, 1)), 1)}
    asked: list[str] = []
    downloader = Downloader("me", BlobStore(tmp_path), Asked(asked), ChannelPool(), lambda: roster)
    for stage in (0, 1, None):
        with pytest.raises(RemoteError):
            await downloader.fetch(bytes(32), [lead], stage=stage)
    assert asked == [lead, box, box, lead, lead, box]
