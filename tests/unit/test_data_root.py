"""Tests of the root that proves an erasure shard: in a contribution, in the voters' check, and in a commit."""

from pathlib import Path

import pytest

from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.shard_roots import ShardRoots
from dilocox.protocol import limits
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import Cluster, alone, initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.norms import norm_code
from dilocox.protocol.payload import merkle
from dilocox.protocol.payload.data_root import commit_tree, work_root
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import canonical, seal
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.blobs import BlobStore
from tests.exchanges import exchange_of
from tests.fake_shards import FakeShards
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

RUN = manifest(availability={})
ROSTER = {identity(n).peer: Cluster(identity(n).peer, alone(identity(n).peer, RUN.model.stages), 1) for n in range(4)}


def test_a_commit_names_one_root_over_what_it_counted_and_all_statements():
    table = Table(RUN).genesis().train(2)
    for commit in table.commits:
        assert commit.body.data_root == commit_tree(commit.body).root != b""
    body = table.commits[1].body
    over = commit_tree(body)
    for place, item in enumerate(chain.taken(body)):
        assert merkle.climb(item.contribution.shares, over.proof(place)) == body.data_root
    said = sha256(b"dilocox-data-v1\0", table.commits[1].body.ballot and table.ballots[0].digest)
    assert merkle.climb(said, over.proof(len(body.counted))) == body.data_root
    table.verify()


def test_where_nothing_is_shared_no_root_is_named():
    table = Table(manifest()).genesis().train(1)
    assert {commit.body.data_root for commit in table.commits} == {b""}


@pytest.mark.parametrize("root", [b"", bytes(32)])
def test_a_commit_that_names_another_root_is_refused(root: bytes):
    table = Table(RUN).genesis().train(1)
    head = initial_head(COORDINATOR.peer)
    head, _ = chain.extend(RUN, head, table.commits[0].envelope)
    body = pb.Commit.FromString(canonical(table.commits[1].body))
    body.data_root = root
    with pytest.raises(RemoteError, match="data_root"):
        chain.extend(RUN, head, seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body).envelope)


def test_the_longest_proof_fits():
    most = (limits.SHARES, 1 + limits.STAGES, limits.CLUSTERS + 15 * limits.CLUSTERS)
    assert sum((count - 1).bit_length() for count in most) <= limits.SHARE_PROOF


@pytest.mark.parametrize(("run", "shares"), [(RUN, b""), (manifest(), bytes(32))])
def test_a_contribution_names_shares_where_the_run_keeps_them_and_nowhere_else(run: Manifest, shares: bytes):
    table = Table(run).genesis()
    judgement = table.submit(table.contribution(0, shares=shares))
    assert judgement.reason == pb.REASON_MALFORMED
    assert {"shards", "shares"} & set(judgement.detail.split())


class Announced:
    """Contribution whose payloads a voter has already; `lie`: the wrong root."""

    def __init__(self, folder: Path, lie: str = "") -> None:
        torch = pytest.importorskip("torch")
        from dilocox.node.outer.state import StageState

        store, shards = BlobStore(folder), FakeShards(RUN)
        leaves, norms = [], []
        for stage in range(RUN.model.stages):
            state = StageState(RUN, stage)
            state.feedback.normal_(generator=torch.Generator().manual_seed(stage))
            encoded = state.encode(owner=owner_of(RUN.run_id, identity(1).peer, 1, stage))
            norms.append(encoded.norm)
            payload = store.put([encoded.raw])
            root = shards.root(ROSTER, store, payload, stage)
            leaves.append(
                pb.Leaf(
                    stage=stage,
                    digest=payload,
                    size=len(encoded.raw),
                    norms=bytes(norm_code(norm) for norm in encoded.norms),
                    shares=digest("no root") if lie == "payload" and stage else b"" if lie == "none" and stage else root,
                )
            )
        listed = store.put([canonical(pb.Leaves(leaves=leaves))])
        shares = work_root(shards.root(ROSTER, store, listed, None), leaves)
        body = pb.Contribution(
            round=1,
            base_state=digest("base"),
            leaves=listed,
            size=sum(leaf.size for leaf in leaves),
            norm=norm_code(sum(norm**2 for norm in norms) ** 0.5),
            shares=digest("no root") if lie == "work" else shares,
        )
        self.statement = seal(identity(1), pb.KIND_CONTRIBUTION, RUN.run_id, body)
        stages = range(RUN.model.stages)
        downloader = Downloader("me", store, None, ChannelPool())  # type: ignore[arg-type]
        roots = ShardRoots(shards.root, store, lambda: ROSTER)
        self.exchange = exchange_of(RUN, downloader, stages, lambda: ROSTER, roots)


@pytest.mark.parametrize(
    ("lie", "verdict"),
    [
        ("", (pb.REASON_UNSPECIFIED, 0)),
        ("work", (pb.REASON_SHARES, 0)),
        ("payload", (pb.REASON_SHARES, 1)),
        ("none", (pb.REASON_SHARES, 1)),
    ],
)
async def test_a_voter_makes_the_shares_and_refuses_who_announces_others(tmp_path: Path, lie: str, verdict: tuple[int, int]):
    announced = Announced(tmp_path, lie)
    assert await announced.exchange.checker.judge(announced.statement, digest("base"), RUN.compression.keep) == verdict


async def test_what_a_worker_made_gets_the_roots_that_voters_ask_for(tmp_path: Path):
    """Check that the daemon adds them to the announcement, and that they are equal after every restart."""
    from dilocox.node.workers.progress import Phase
    from dilocox.protocol.payload.payload_index import read_leaves
    from dilocox.protocol.pb import worker_pb2 as worker

    honest = Announced(tmp_path)
    store, said = BlobStore(tmp_path), honest.statement.body
    leaves = read_leaves(RUN, store.read(said.leaves))
    payloads = [worker.StagePayload(stage=leaf.stage, digest=leaf.digest, size=leaf.size, norms=leaf.norms) for leaf in leaves]
    bare = worker.Boundary(round=1, payloads=payloads)
    rooted = honest.exchange.roots.added(bare)
    phase = Phase(rooted, list(rooted.payloads), [])
    assert store.put([canonical(phase.leaves)]) == said.leaves
    assert honest.exchange.roots.of_work(said.leaves, phase.leaves.leaves) == said.shares
    assert phase.work == Phase(bare, payloads, []).work == Phase(bare, payloads, []).leaves
