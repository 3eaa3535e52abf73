"""Test of the attack that running code has shown, through the real tally and apply. One cluster of four negates another's
payload, scales it to every bound, announces the most allowed tokens, and is counted in each round.

The model is a bowl: the loss is the squared distance of Θ from its optimum, and honest work is a noisy step towards it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.poison.design import Unbounded
from dilocox.cli.dev.verify import replay_round
from dilocox.cli.progress import working
from dilocox.node.exchange.apply_builder import takes_of
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.outer.state import EncodedStage, StageState
from dilocox.node.state.resume_points import state_blob
from dilocox.node.training.worker.commit_applier import read_commit
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.norms import LARGEST, matches, norm_code, norm_of
from dilocox.protocol.payload.data_root import work_root
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.payload.payload_index import check_bounds, check_leaves, check_payload
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.chain_file import ChainFile
from tests.exchanges import Nobody, exchange_of
from tests.fake_shards import FakeShards
from tests.helpers import COORDINATOR, Table, identity, manifest

CLUSTERS, HOSTILE = range(4), 3
ROUNDS = 10
STEP = 0.3
"""Share of the remaining distance, in one round."""
OLD = {"weight_cap": 0, "tensor_clip_ratio": 0}
"""The rules before, without `largest_rms`: payloads clipped at two medians, and weighed by what they announce."""
NONE = {**OLD, "clip_ratio": 1024.0}


def run_with(**sections: dict[str, Any]) -> Manifest:
    rounds = {"count": ROUNDS, "start_clusters": 4, "max_inner_steps": 32, **sections.pop("rounds", {})}
    model = {"vocab_size": 64, "num_hidden_layers": 2}
    return manifest(model=model, compression={"codec": "int4"}, rounds=rounds, **sections)


def without_bound(rounds: dict[str, Any]) -> Manifest:
    return Unbounded.model_validate(run_with(rounds=rounds).model_dump())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: a second one mostly waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Bowl:
    """Four clusters, the last of which may be hostile; all have the same Θ."""

    def __init__(self, run: Manifest, folder: Path, hostile: bool) -> None:
        self.run, self.hostile, self.store = run, hostile, BlobStore(folder / "blobs")
        stages = range(run.model.stages)
        self.theta = [StageState(run, stage) for stage in stages]
        self.table = Table(run)
        for number in CLUSTERS:
            self.table.submit(self.table.claim(number, state=self.root()))
        self.owed = [[StageState(run, stage) for stage in stages] for _ in CLUSTERS]
        self.random = torch.Generator().manual_seed(0)
        self.goal = [0.1 * torch.randn(state.size, generator=self.random) for state in self.theta]
        self.leaves: dict[str, list[pb.Leaf]] = {}
        self.shards = FakeShards(run)
        self.roots = run.availability is not None
        """True if their announcements name the roots over the erasure shards; in a run with shards, false makes the voters
        lie too."""

    def loss(self) -> float:
        """Return the loss, 1 at the beginning."""
        distance = sum(
            float((goal - state.parameters).square().sum()) for goal, state in zip(self.goal, self.theta, strict=True)
        )
        return distance / sum(float(goal.square().sum()) for goal in self.goal)

    def encode(self, number: int) -> list[EncodedStage]:
        name, round = identity(number).peer, self.table.head.round
        states = self.owed[number]
        if self.hostile and number == HOSTILE:
            for state, victim in zip(states, self.owed[0], strict=True):
                state.feedback.zero_()
                for digest in [leaf.digest for leaf in self.leaves[identity(0).peer] if leaf.stage == victim.stage]:
                    state.return_to_feedback(self.store.view(digest))
                state.feedback.mul_(-1000.0)
        else:
            for state, theta, goal in zip(states, self.theta, self.goal, strict=True):
                noise = torch.randn(state.size, generator=self.random)
                state.feedback.add_((theta.parameters - goal) * STEP).add_(noise, alpha=0.001)
        return [state.encode(owner=owner_of(self.run.run_id, name, round, state.stage)) for state in states]

    def say(self, number: int, stages: Sequence[EncodedStage]) -> None:
        """Announce what was encoded, all of which voters let pass."""
        name, head = identity(number).peer, self.table.head
        leaves = [
            pb.Leaf(stage=n, digest=self.store.put([s.raw]), size=len(s.raw), norms=bytes(norm_code(norm) for norm in s.norms))
            for n, s in enumerate(stages)
        ]
        for leaf in leaves if self.roots else ():
            leaf.shares = self.shards.root(head.roster, self.store, leaf.digest, leaf.stage)
        listed = self.store.put([canonical(pb.Leaves(leaves=leaves))])
        shares = work_root(self.shards.root(head.roster, self.store, listed, None), leaves) if self.roots else b""
        steps = self.run.rounds.max_inner_steps if self.hostile and number == HOSTILE else self.run.rounds.inner_steps
        statement = self.table.contribution(
            number,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            samples_read=head.ledger.leases[name].counted + steps * self.run.training.batch_size,
            norm=norm_code(sum(stage.norm**2 for stage in stages) ** 0.5),
            size=sum(leaf.size for leaf in leaves),
            leaves=listed,
            base_state=self.root(),
            **({"shares": shares} if self.roots else {}),
        )
        check_leaves(statement.body, leaves)
        for leaf in leaves:
            check_bounds(self.run, leaf)
            check_payload(self.run, name, head.round, leaf, self.store.view(leaf.digest), head.rank_or_k)
        self.leaves[name] = leaves
        self.table.submit(statement)

    def root(self) -> bytes:
        digests = [self.store.put([state.state_bytes()]) for state in self.theta]
        return self.store.put([state_blob(dict(enumerate(digests)))])

    def round(self) -> None:
        before = self.table.head
        for number in CLUSTERS:
            self.say(number, self.encode(number))
        self.table.vote(CLUSTERS)
        items = chain.taken(self.table.commits[-1].body)
        takes = takes_of(self.run, items, [self.leaves[item.cluster] for item in items])
        commit = read_commit(before.round, takes, before.rank_or_k)
        for stage, state in enumerate(self.theta):
            for number in CLUSTERS:
                name, owed = identity(number).peer, self.owed[number][stage]
                left = commit.leaves(name, stage, len(owed.specs))
                owed.return_to_feedback(self.store.view(self.leaves[name][stage].digest), shares=left)
            commit.apply_to(state, self.store.view)

    def train(self, rounds: int = ROUNDS) -> float:
        for _ in range(rounds):
            self.round()
        assert len(chain.taken(self.table.commits[-1].body)) == 4, "all were counted"
        self.table.verify()
        return self.loss()


def test_the_live_attack_destroys_a_model_without_the_rules_and_costs_a_part_of_it_with_them(tmp_path: Path):
    honest = Bowl(run_with(), tmp_path / "a", hostile=False).train()
    assert honest < 0.01
    assert Bowl(without_bound(NONE), tmp_path / "b", hostile=True).train() > 1e6
    assert Bowl(without_bound(OLD), tmp_path / "c", hostile=True).train() > 2, "what running code has shown"
    assert Bowl(run_with(), tmp_path / "d", hostile=True).train() < 0.1, "it slows the run, and does not destroy it"
    assert Bowl(run_with(outer={"aggregate": "centered-clip"}), tmp_path / "e", hostile=True).train() < 0.05


@pytest.mark.parametrize("rounds", [{}, {"tensor_clip_ratio": 0, "clip_ratio": 1.0}])
def test_without_hostile_clusters_the_rules_cost_nothing(rounds: dict[str, Any], tmp_path: Path):
    base = Bowl(without_bound(NONE), tmp_path / "none", hostile=False).train()
    assert Bowl(run_with(rounds=rounds), tmp_path / "rules", hostile=False).train() < 1.5 * base + 1e-3


def kept(bowl: Bowl, folder: Path) -> ChainFile:
    found = ChainFile(folder / "chain.db", bowl.run)
    for commit in bowl.table.commits:
        found.write(initial_head(COORDINATOR.peer), commit)
    return found


@pytest.mark.parametrize("aggregate", ["mean", "centered-clip"])
def test_a_replay_finds_the_state_that_clips_of_tensors_made(aggregate: str, tmp_path: Path):
    bowl = Bowl(run_with(outer={"aggregate": aggregate}), tmp_path, hostile=True)
    bowl.train(3)
    file = kept(bowl, tmp_path)
    with working("") as bar:
        made = replay_round(file, tmp_path, bowl.table.commits, 1, bar, None)
    assert set(made) == {"0", "1"}
    file.close()


@pytest.mark.parametrize("honest", [True, False])
def test_a_replay_finds_roots_that_are_over_no_shares(honest: bool, tmp_path: Path):
    """Check dishonest voters: the commit is valid, and no peer could prove a shard."""
    bowl = Bowl(run_with(availability={}), tmp_path, hostile=False)
    bowl.roots = honest
    bowl.train(3)
    with working("") as bar, closing(kept(bowl, tmp_path)) as file:
        if honest:
            assert set(replay_round(file, tmp_path, bowl.table.commits, 1, bar, bowl.shards)) == {"0", "1"}
            return
        with pytest.raises(RemoteError) as found:
            replay_round(file, tmp_path, bowl.table.commits, 1, bar, bowl.shards)
    assert found.value.reason == pb.REASON_SHARES


@pytest.mark.parametrize("colluding", [False, True])
def test_a_copy_is_refused_and_its_author_counts(colluding: bool, tmp_path: Path):
    """Check it if half of the voters accept it: the commit is valid, and a replay of the round detects them."""
    author, copier, others = 0, 2, (1, 3)
    bowl = Bowl(run_with(), tmp_path, hostile=False)
    for number in (author, *others):
        bowl.say(number, bowl.encode(number))
    said = bowl.table.state.gathered.contributions[identity(author).peer][0].body
    first, second = (pb.Leaf.FromString(leaf.SerializeToString()) for leaf in bowl.leaves[identity(author).peer])
    with pytest.raises(RemoteError) as refused:
        check_payload(bowl.run, identity(copier).peer, 1, first, bowl.store.view(first.digest), bowl.table.head.rank_or_k)
    assert refused.value.reason == pb.REASON_COPIED
    root = said.leaves
    if colluding:  # other entries, so that no statement shows it: they name a copied payload beside one of its own
        own = bowl.encode(copier)[1]
        second = pb.Leaf(
            stage=1, digest=bowl.store.put([own.raw]), size=len(own.raw), norms=bytes(norm_code(norm) for norm in own.norms)
        )
        root = bowl.store.put([canonical(pb.Leaves(leaves=[first, second]))])
    norm = norm_code(sum(norm_of(code) ** 2 for leaf in (first, second) for code in leaf.norms) ** 0.5)
    stolen = {"leaves": root, "norm": norm, "size": first.size + second.size, "base_state": said.base_state}
    bowl.table.submit(bowl.table.contribution(copier, **stolen))
    for number in CLUSTERS:
        complains = number != copier and not (colluding and number in others)
        bowl.table.submit(bowl.table.receipt(number, {copier: pb.REASON_COPIED} if complains else {}))
    body = bowl.table.commits[-1].body
    assert len(chain.taken(body)) == 3 + colluding
    assert [(item.peer, item.reason) for item in body.excluded] == [(identity(copier).peer, pb.REASON_COPIED)] * (not colluding)
    if not colluding:
        return
    for number in CLUSTERS:
        bowl.table.submit(bowl.table.contribution(number, base_state=bowl.root()))
    bowl.table.vote(CLUSTERS)
    with working("") as bar, closing(kept(bowl, tmp_path)) as file, pytest.raises(RemoteError, match=r"^copied: "):
        replay_round(file, tmp_path, bowl.table.commits, 1, bar, None)


def test_what_is_too_large_for_the_run_is_sent_in_parts_and_refused_where_it_is_not(tmp_path: Path):
    run = run_with(training={"learning_rate": 0.1 / 32})
    state = StageState(run, 0)
    state.feedback.fill_(5.0)
    said = state.encode()
    leaf = pb.Leaf(stage=0, digest=digest_of([said.raw]), size=len(said.raw), norms=bytes(norm_code(n) for n in said.norms))
    check_bounds(run, leaf)
    assert float(state.feedback.min()) == pytest.approx(5.0 - 0.05, rel=0.01), "the rest is owed"
    loud = StageState(run_with(), 0)
    loud.feedback.fill_(0.3)
    norms = bytes(norm_code(norm) for norm in loud.encode().norms)
    with pytest.raises(RemoteError) as refused:
        check_bounds(run, replace_norms(leaf, norms))
    assert refused.value.reason == pb.REASON_NORM_TOO_LARGE


def test_a_norm_that_no_code_tells_is_refused_whatever_the_run_allows():
    """Check the largest code: it covers all larger norms, so no median nor clip would know their excess."""
    run = without_bound({})
    state = StageState(run, 0)
    state.feedback.fill_(1e9)
    norms = bytes(norm_code(norm) for norm in state.encode().norms)
    leaf = pb.Leaf(stage=0, digest=bytes(32), size=1, norms=norms)
    check_bounds(run, leaf)
    assert norm_code(1e30) == norm_code(1e300)
    for code in range(256):
        told = not matches(code, 1e30)
        lying = replace_norms(leaf, bytes([code] * len(norms)))
        if told and code <= norm_code(LARGEST):
            check_bounds(run, lying)
        else:
            with pytest.raises(RemoteError, match=r"^norm-too-large: "):
                check_bounds(run, lying)


def replace_norms(leaf: pb.Leaf, norms: bytes) -> pb.Leaf:
    return pb.Leaf(stage=leaf.stage, digest=leaf.digest, size=leaf.size, norms=norms)


async def test_what_a_restart_owes_is_known_by_tensor_while_leaves_are_served_and_in_all_after_that(tmp_path: Path):
    bowl = Bowl(run_with(), tmp_path, hostile=True)
    bowl.train(1)
    commit, stages = bowl.table.commits[-1], range(bowl.run.model.stages)
    items = chain.taken(commit.body)
    exchange = exchange_of(bowl.run, Downloader(identity(9).peer, bowl.store, Nobody(), ChannelPool()), stages)
    known = await exchange.applies.counts(commit)
    expected = takes_of(bowl.run, items, [bowl.leaves[item.cluster] for item in items])
    assert [list(take.clips) for take in known.takes] == [list(take.clips) for take in expected]
    assert [list(take.payloads) for take in known.takes] == [list(take.payloads) for take in expected]
    loud = next(take for take in known.takes if take.cluster == identity(HOSTILE).peer)
    assert max(max(codes) for codes in loud.clips) > loud.clip > 0, "a tensor is clipped more than the whole"
    nothing = Downloader(identity(9).peer, BlobStore(tmp_path / "elsewhere"), Nobody(), ChannelPool())
    elsewhere = exchange_of(bowl.run, nothing, stages)
    gone = await elsewhere.applies.counts(commit)
    assert [(take.clip, list(take.clips)) for take in gone.takes] == [(item.clip, []) for item in items]
