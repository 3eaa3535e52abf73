"""Hostile peer that drives the node's own machine, so it is admitted, and signs spoiled contributions. Real DHT, TLS and
gRPC."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.outer.state import StageState
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.checks.scores import Scored
from dilocox.protocol.crypto import Identity
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.member import member, member_io
from dilocox.protocol.norms import norm_code, norm_of
from dilocox.protocol.payload.payload import Layout, owner_of
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.net import tls
from dilocox.transport.net.blob_server import PeerService
from dilocox.transport.net.dht import Dht, DhtSettings
from dilocox.transport.net.network import choose_port, multiaddr
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.e2e.conftest import NO_TIME

Spoil = Callable[["HostilePeer", pb.Contribution, pb.Leaves], None]


class HostilePeer:
    """Hostile peer: `async with HostilePeer(link, folder) as peer: await peer.misbehave(spoil)`."""

    def __init__(self, link: JoinLink, folder: Path) -> None:
        self.link, self.folder = link, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = Identity(os.urandom(32))
        self.store = BlobStore(folder / "blobs")
        self.sequences = itertools.count(1)
        self.spoil: Spoil = lambda peer, body, leaves: None
        self.moved = asyncio.Event()
        self.speak = asyncio.Event()

    async def __aenter__(self) -> "HostilePeer":
        self.tasks = Tasks()
        certificate = tls.load_or_create(self.folder)
        self.server, port = await create_server("127.0.0.1:0", certificate)
        rpc.add_PeerServicer_to_server(
            PeerService(self.store, CallerAuth(self.link.run_id, certificate.certificate_der)), self.server
        )
        await self.server.start()
        dht_port = choose_port()
        listen = f"/ip4/127.0.0.1/tcp/{dht_port}"
        dht = Dht(DhtSettings(self.link.run_id, self.identity, self.folder, listen, self.link.dht_addresses))
        self.directory = PeerDirectory(dht, self.identity, self.link.run_id, 1)
        self.channels = ChannelPool(self.identity, self.link.run_id)
        self.tasks.start(dht.run(), "dht")
        addresses = [multiaddr("127.0.0.1", dht_port, self.identity.peer)]
        dht.know([self.link.coordinator])
        make = lambda: self.directory.seal_record(f"127.0.0.1:{port}", certificate.certificate_der, "mallory", addresses)  # noqa: E731
        self.tasks.start(self.directory.publish_forever(make), "publish")
        self.coordinator = CoordinatorLink(self.link, self.directory, self.channels)
        self.run, _ = await self.coordinator.run()
        self.chain = ChainFile(self.folder / "chain.db", self.run)
        self.state = member.start(self.run, self.identity.peer, self.chain.head)
        self.tasks.start(self._follow(), "follow")
        self.tasks.start(self._offer(), "offer")
        self.tasks.start(self._beat(), "beat")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.tasks.close()
        await self.channels.close()
        await self.server.stop(grace=0)
        self.chain.close()

    def feed(self, event: member_io.Input) -> None:
        """Feed the node's own machine; sign the statements that it makes, after spoiling them."""
        self.state, effects = member.step(self.state, event, time.monotonic())
        for effect in effects:
            match effect:
                case member_io.Sign(kind, body):
                    if kind == pb.KIND_CONTRIBUTION:
                        self._spoil(body)
                    self.feed(member_io.Signed(seal(self.identity, kind, self.run.run_id, body)))
                case member_io.Judge(contribution):
                    self.feed(member_io.Judged(contribution.digest, (pb.REASON_UNSPECIFIED, 0)))  # judges without a check
                case member_io.Measure(contribution):
                    self.feed(Scored(contribution.digest, Score(1.0, 0.0, 1.0)))  # nor at what it does
                case member_io.Halt(why):
                    raise AssertionError(why)
        self.speak.set()
        self.moved.set()
        self.moved.clear()

    async def _follow(self) -> None:
        """Follow the chain, and learn the open round's state from others' contributions: this peer never computed it."""
        away = lambda: self.feed(member_io.Away())  # noqa: E731
        async for event in self.coordinator.watch(lambda: self.chain.length, self._heartbeat, away):
            if not self.state.connected:
                self.feed(member_io.Connected())
            if event.WhichOneof("event") != "statement" or event.statement.kind == pb.KIND_PEER_RECORD:
                continue
            if event.statement.kind == pb.KIND_COMMIT:
                if pb.Commit.FromString(event.statement.body).round == self.chain.length:
                    self.feed(member_io.Committed(self.chain.append(event.statement), self.chain.head))
                continue
            statement = open_envelope(event.statement, self.run.run_id, (pb.KIND_BALLOT, pb.KIND_CONTRIBUTION))
            body = statement.body
            if statement.kind == pb.KIND_CONTRIBUTION and statement.peer != self.identity.peer and self.state.root is None:
                self.feed(member_io.StateReady(body.round, body.base_state, None))
            self.feed(member_io.Seen(statement))

    async def _offer(self) -> None:
        while True:
            self.speak.clear()
            for statement in member.offers(self.state):
                answer = await self.coordinator.submit_once(statement.envelope)
                if answer is not None:
                    self.feed(member_io.Answered(statement, answer.outcome, answer.reason, answer.detail, answer.head))
            await self.speak.wait()

    def _heartbeat(self) -> Statement[pb.Heartbeat]:
        body = pb.Heartbeat(sequence=next(self.sequences), head=self.chain.head.digest)
        return seal(self.identity, pb.KIND_HEARTBEAT, self.run.run_id, body)

    async def _beat(self) -> None:
        while True:
            await self.coordinator.submit_once(self._heartbeat().envelope)
            self.speak.set()  # send again the statements that the coordinator does not have
            await asyncio.sleep(1)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.moved.wait()

    async def misbehave(self, spoil: Spoil) -> int:
        """Contribute once, spoiled, as soon as this peer is on the roster; return the round."""
        self.spoil = spoil
        await self.until(lambda: self.state.on_roster and self.state.root is not None)
        head, steps = self.state.head, self.run.rounds.inner_steps
        read = head.ledger.leases[self.identity.peer].counted + steps * self.run.training.batch_size
        phase = member_io.PhaseEnded(
            round=head.round,
            base=self.state.root or b"",
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=1.0,
            samples_read=read,
            leaves=b"",
            size=0,
            norm=0,
            effective_rank=0.0,
            error=0.0,
        )
        self.feed(phase)
        await self.until(lambda: pb.KIND_CONTRIBUTION in self.state.open.own or self.state.head.round > head.round)
        return head.round

    async def judged(self, spoil: Spoil) -> int:
        """Misbehave until others judge it, however busy the machine is; return the round, when it is closed."""
        while True:
            number = await self.misbehave(spoil)
            while (commit := self.chain.commit(number)) is None:
                await self.moved.wait()
            if not any(item.peer == self.identity.peer and item.reason in NO_TIME for item in commit.body.excluded):
                return number

    def _spoil(self, body: pb.Contribution) -> None:
        leaves = self.leaves()
        body.size, body.norm = 0, 0
        self.spoil(self, body, leaves)
        body.leaves = self.store.put([canonical(leaves)])
        body.size = body.size or sum(leaf.size for leaf in leaves.leaves)
        body.norm = body.norm or norm_code(math.hypot(*(norm_of(code) for leaf in leaves.leaves for code in leaf.norms)))

    def payload(self, stage: int, scale: float = 1e-3, of: str = "") -> tuple[bytes, bytes]:
        """Return a well-formed payload of this stage for the open round, and its norm codes; `of`: its author, by default
        this peer."""
        return self._payload(owner_of(self.run.run_id, of or self.identity.peer, self.state.head.round, stage), stage, scale)

    @cache  # noqa: B019
    def _payload(self, owner: bytes, stage: int, scale: float) -> tuple[bytes, bytes]:
        torch.set_num_threads(1)  # beside eight busy workers two threads would mostly wait for each other
        state = StageState(self.run, stage)
        state.feedback.normal_(std=scale)
        encoded = state.encode(owner=owner)
        return encoded.raw, bytes(norm_code(norm) for norm in encoded.norms)

    def layouts(self, stage: int) -> tuple[Layout, ...]:
        return StageState(self.run, stage).layout().tensors

    def leaves(self) -> pb.Leaves:
        leaves = pb.Leaves()
        for stage in range(self.run.model.stages):
            leaves.leaves.add(stage=stage)
            self.serve(leaves, stage, *self.payload(stage))
        return leaves

    def serve(self, leaves: pb.Leaves, stage: int, raw: bytes, norms: bytes) -> None:
        """Announce and serve these bytes as the stage's payload."""
        leaf = leaves.leaves[stage]
        leaf.digest, leaf.size, leaf.norms = self.store.put([raw]), len(raw), norms
