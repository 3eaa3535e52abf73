"""Tests of a node's duties beside its machine: the manifests that it accepts, its checks, and its response to a second
commit."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.node.context.run_context import RunContext
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.member.driver import MemberDriver
from dilocox.node.member.participant import Participant
from dilocox.node.outer.state import StageState
from dilocox.node.state.resume_points import state_blob
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.node.training.model.trainer import Commit, Take
from dilocox.node.workers.progress import Progress
from dilocox.protocol import limits
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.member import member
from dilocox.protocol.norms import norm_code
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import open_manifest
from dilocox.protocol.wire.messages import canonical, parse, seal
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from tests.exchanges import exchange_of
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

OWNER = identity(99)
RUN = manifest(run={"name": "test", "owner": OWNER.key.hex()}, model={"vocab_size": 64}, compression={"codec": "int4"})


def test_a_manifest_is_its_owner_s():
    signed = seal(OWNER, pb.KIND_MANIFEST, RUN.run_id, RUN.canonical_bytes()).envelope
    assert open_manifest(signed, RUN.run_id) == RUN
    forged = seal(identity(98), pb.KIND_MANIFEST, RUN.run_id, RUN.canonical_bytes()).envelope
    for envelope, run, why in (
        (forged, RUN.run_id, "not signed by its owner"),
        (signed, digest("another run"), "does not hash"),
    ):
        with pytest.raises(RemoteError, match=why) as caught:
            open_manifest(envelope, run)
        assert caught.value.reason == pb.REASON_WRONG_RUN


async def test_two_commits_for_one_round_halt_a_node(tmp_path: Path):
    table = Table(RUN).genesis()
    table.train(1)
    async with hearing(tmp_path, Says()) as node:
        node.chain.append(table.commits[1].envelope)
        await node.take_commit(table.commits[1].envelope)  # again: harmless
        other = pb.Commit.FromString(table.commits[1].envelope.body)
        other.closed_at_ms += 1
        with pytest.raises(LocalError, match="two different commits"):
            await node.take_commit(seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, other).envelope)
        with pytest.raises(RemoteError, match=r"^bad-signature: "):
            await node.take_commit(seal(identity(1), pb.KIND_COMMIT, RUN.run_id, other).envelope)


class Says:
    """Coordinator that sends nothing but tips, and accepts nothing."""

    def __init__(self, *tips: services.Tip) -> None:
        self.tips = tips
        self.given = 0

    async def watch(self, *_: object) -> AsyncIterator[services.WatchEvent]:
        for tip in self.tips:
            yield services.WatchEvent(tip=tip)
            await asyncio.sleep(0)

    async def submit_once(self, envelope: pb.Envelope) -> None:
        self.given += 1
        await asyncio.Event().wait()


class Idle:
    """Workers that accept commands, and do nothing."""

    progress = Progress()

    def status(self) -> None: ...

    def chain_grew(self) -> None: ...


@asynccontextmanager
async def hearing(folder: Path, coordinator: Says) -> AsyncIterator[Participant]:
    """Run a connected node that has a commit."""
    tasks = Tasks()
    with (
        closing(ChainFile(folder / "chain.db", RUN)) as chain,
        closing(SignedStatementLog(folder / "own.db", RUN.run_id)) as own,
        closing(EventLog(folder / "events.db")) as kept,
    ):
        chain.append(Table(RUN).genesis().commits[0].envelope)
        known: Any = PeerDirectory(None, identity(1), RUN.run_id, 1)
        said: Any = coordinator
        workers: Any = Idle()
        context = RunContext(identity(1), chain, BlobStore(folder / "blobs"), tasks)
        machine = MemberDriver(context, member.start(RUN, identity(1).peer, chain.head), own, workers, kept)
        node = Participant(context, machine, workers, said, known, own, Traffic())
        try:
            yield node
        finally:
            await tasks.close()


async def test_a_coordinator_that_lacks_commits_is_given_them_once_at_a_time(tmp_path: Path):
    """Reproduce a fault: each repeated request started a task that sent all of them."""
    coordinator = Says(*[services.Tip(round=0)] * 100)
    async with hearing(tmp_path, coordinator) as node:
        await node.watch()
        assert coordinator.given == 1


async def test_why_a_round_is_open_is_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Reproduce a fault: a coordinator's text went unchecked into logs and terminals."""
    with caplog.at_level("INFO"):
        async with hearing(tmp_path, Says(services.Tip(why="\x1b[2Jit waits" + 4096 * "!"))) as node:
            await node.watch()
            assert node.round_why.startswith("?[2Jit waits!!")
            assert len(node.round_why) == limits.EVENT_CHARACTERS
            assert node.round_why in caplog.text


class Announced:
    """Contribution whose payloads a node has already."""

    def __init__(self, folder: Path, leaf_code: int = 0, norm_code_off: int = 0) -> None:
        store = BlobStore(folder)
        leaves, norms = [], []
        for stage in range(RUN.model.stages):
            state = StageState(RUN, stage)
            state.feedback.normal_(generator=torch.Generator().manual_seed(stage))
            encoded = state.encode(owner=owner_of(RUN.run_id, identity(1).peer, 1, stage))
            norms.append(encoded.norm)
            codes = bytearray(norm_code(norm) for norm in encoded.norms)
            codes[0] += leaf_code if stage == 1 else 0
            leaves.append(pb.Leaf(stage=stage, digest=store.put([encoded.raw]), size=len(encoded.raw), norms=bytes(codes)))
        total = sum(norm**2 for norm in norms) ** 0.5
        body = pb.Contribution(
            round=1,
            base_state=digest("base"),
            leaves=store.put([canonical(pb.Leaves(leaves=leaves))]),
            size=sum(leaf.size for leaf in leaves),
            norm=norm_code(total) + norm_code_off,
        )
        self.statement = seal(identity(1), pb.KIND_CONTRIBUTION, RUN.run_id, body)
        self.exchange = exchange_of(RUN, Downloader("me", store, None, ChannelPool()))  # type: ignore[arg-type]

    async def verdict(self) -> tuple[int, int]:
        return await self.exchange.checker.judge(self.statement, digest("base"), RUN.compression.keep)


async def test_announced_norms_are_checked_against_the_payload(tmp_path: Path):
    assert await Announced(tmp_path / "a").verdict() == (pb.REASON_UNSPECIFIED, 0)
    assert await Announced(tmp_path / "b", leaf_code=3).verdict() == (pb.REASON_NORM_MISMATCH, 1)
    assert await Announced(tmp_path / "c", norm_code_off=4).verdict() == (pb.REASON_NORM_MISMATCH, 0)
    spoiled = Announced(tmp_path / "d")
    assert (await spoiled.exchange.checker.judge(spoiled.statement, digest("other"), 8))[0] == pb.REASON_WRONG_BASE


async def test_what_lies_here_is_no_list_because_somebody_calls_it_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check it: a contribution may name any blob that all nodes have, and a state of many gigabytes would be read into
    memory."""
    monkeypatch.setattr(limits, "LEAVES_BYTES", 1000)
    good = Announced(tmp_path)
    state = BlobStore(tmp_path).put([bytes(1001)])
    good.statement.body.leaves = state
    monkeypatch.setattr(BlobStore, "read", lambda store, digest: pytest.fail("it is read"))
    assert await good.verdict() == (pb.REASON_OVERSIZE, 0)


async def test_what_is_let_go_once_it_was_fetched_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reproduce a fault: a contribution may name blobs of old rounds, which other peers delete at any moment, and this
    ended daemons."""
    good, store, fetched = Announced(tmp_path), BlobStore(tmp_path), Counter[bytes]()
    raw = {digest: store.read(digest) for digest in store.digests()}

    async def fetch(digest: bytes, *_: object, **__: object) -> None:
        store.put([raw[digest]])
        fetched[digest] += 1
        if fetched[digest] == 1:
            store.remove(digest)

    monkeypatch.setattr(good.exchange.downloader, "fetch_forever", fetch)
    assert await good.verdict() == (pb.REASON_UNSPECIFIED, 0)
    assert fetched.keys() == raw.keys()
    fetched.clear()
    monkeypatch.setattr(good.exchange.downloader, "fetch", fetch)
    assert len(await good.exchange.applies.payload_index(good.statement.body, ())) == RUN.model.stages
    root = store.put([state_blob({stage: digest(stage) for stage in range(RUN.model.stages)})])
    raw[root] = store.read(root)
    starts = good.exchange.starts(None)
    assert len(await starts.stages_of(1, root, ())) == RUN.model.stages
    assert fetched[root] == 2


def test_an_apply_takes_of_a_payload_what_the_commit_says():
    payloads = {}
    for name in (b"a", b"b"):
        state = StageState(RUN, 0)
        state.feedback.normal_(generator=torch.Generator().manual_seed(name[0]))
        payloads[name] = memoryview(state.encode().raw)

    def applied(clip: int, clips: list[bytes]) -> list[torch.Tensor]:
        state = StageState(RUN, 0)
        takes = [Take("a", 3, [b"a"]), Take("b", 1, [b"b"], clip, clips)]
        Commit(1, RUN.compression.keep, takes).apply_to(state, payloads.__getitem__)
        return [tensor.clone() for _, tensor in state.views(state.parameters)]

    tensors = len(StageState(RUN, 0).specs)
    whole, half, none = applied(0, []), applied(8, []), applied(255, [])
    assert not any(map(torch.equal, whole, half))
    assert all(torch.allclose(h, (w + n) / 2, atol=1e-6) for h, w, n in zip(half, whole, none, strict=True))
    first = applied(0, [bytes([8] + [0] * (tensors - 1))])
    assert torch.equal(first[0], half[0])
    assert all(map(torch.equal, first[1:], whole[1:])), "only one tensor of it was too large"


def test_what_a_commit_takes_is_not_owed_again():
    commit = Commit(1, 8, [Take("a", 3, [b"a"]), Take("b", 1, [b"b"], 8), Take("c", 1, [b"c"], 8, [bytes([8, 16])])])
    assert commit.leaves("a", 0, 2) == [0.0, 0.0]
    assert commit.leaves("b", 0, 2) == [0.5, 0.5]
    assert commit.leaves("c", 0, 2) == [0.5, 0.75]
    assert commit.leaves("not counted", 0, 2) == [1.0, 1.0]
    announced = commit.takes[1].payloads[0]
    assert commit.leaves("b", 0, 2, announced) == [0.5, 0.5]
    assert commit.leaves("b", 0, 2, digest("made anew since")) == [1.0, 1.0], "an earlier life's was counted, not this one"


def test_bytes_that_nobody_judges_are_refused():
    body = pb.Leave(serial=1, round=1)
    hidden = canonical(body) + b"\xfa\x3e\x05extra"  # a field of number 1007
    assert pb.Leave.FromString(hidden).serial == 1
    with pytest.raises(RemoteError, match=r"^malformed: .*canonical"):
        parse(pb.Leave, hidden)
    assert parse(pb.Leave, canonical(body)) == body
