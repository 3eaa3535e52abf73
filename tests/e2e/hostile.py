"""A peer that speaks the protocol well enough to be admitted, and then misbehaves. Real DHT, TLS and gRPC."""

import asyncio
import itertools
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.outer.state import StageState
from dilocox.protocol.crypto import Identity
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.messages import Statement, canonical, open_envelope, seal
from dilocox.protocol.norms import norm_code, norm_of
from dilocox.protocol.payload import Layout
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.rules import bits
from dilocox.transport import tls
from dilocox.transport.blobs import BlobStore
from dilocox.transport.callers import Callers
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.dht import Dht, DhtSettings
from dilocox.transport.network import choose_port, multiaddr
from dilocox.transport.presence import Directory
from dilocox.transport.rpc import ChannelPool, create_server
from dilocox.transport.serve import BlobService
from dilocox.transport.tasks import Tasks

Spoil = Callable[["HostilePeer", pb.Contribution, pb.Leaves], None]


class HostilePeer:
    """`async with HostilePeer(link, folder) as peer: await peer.misbehave(spoil)`."""

    def __init__(self, link: JoinLink, folder: Path) -> None:
        self.link, self.folder = link, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = Identity(os.urandom(32))
        self.store = BlobStore(folder / "blobs")
        self.bases: dict[int, bytes] = {}
        self.announced = b""
        self.serials = itertools.count(1)
        self.sequences = itertools.count(1)
        self.moved = asyncio.Event()

    async def __aenter__(self) -> "HostilePeer":
        self.tasks = Tasks()
        certificate = tls.load_or_create(self.folder)
        self.server, port = await create_server("127.0.0.1:0", certificate)
        rpc.add_PeerServicer_to_server(
            BlobService(self.store, Callers(self.link.run_id, certificate.certificate_der)), self.server
        )
        await self.server.start()
        dht_port = choose_port()
        listen = f"/ip4/127.0.0.1/tcp/{dht_port}"
        dht = Dht(DhtSettings(self.link.run_id, self.identity, self.folder, listen, self.link.dht_addresses))
        self.directory = Directory(dht, self.identity, self.link.run_id, 1)
        self.channels = ChannelPool(self.identity, self.link.run_id)
        self.tasks.start(dht.run(), "dht")
        addresses = [multiaddr("127.0.0.1", dht_port, self.identity.peer)]
        make = lambda: self.directory.seal_record(f"127.0.0.1:{port}", certificate.certificate_der, "mallory", addresses)  # noqa: E731
        self.tasks.start(self.directory.publish_forever(make), "publish")
        self.coordinator = CoordinatorLink(self.link, self.directory, self.channels)
        self.run, _ = await self.coordinator.manifest()
        self.chain = ChainFile(self.folder / "chain.db", self.run)
        self.tasks.start(self._follow(), "follow")
        self.tasks.start(self._beat(), "beat")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.tasks.close()
        await self.channels.close()
        await self.server.stop(grace=0)
        self.chain.close()

    async def _follow(self) -> None:
        """Keep the chain, learn the open round's base state from others' contributions, and accept everything."""
        async for event in self.coordinator.watch(lambda: self.chain.length, self._heartbeat, lambda: None):
            if event.WhichOneof("event") != "statement":
                continue
            kind, raw = event.statement.kind, event.statement.body
            if kind == pb.KIND_COMMIT and pb.Commit.FromString(raw).round == self.chain.length:
                self.chain.append(event.statement)
            elif kind == pb.KIND_CONTRIBUTION and event.statement.key != self.identity.key:
                body = pb.Contribution.FromString(raw)
                self.bases[body.round] = body.base_state
            elif kind == pb.KIND_BALLOT:
                self.tasks.start(self._vote(open_envelope(event.statement, self.run.run_id, (pb.KIND_BALLOT,))), "vote")
            self.moved.set()
            self.moved.clear()

    async def _vote(self, ballot: Statement[pb.Ballot]) -> None:
        listed = list(ballot.body.contributions)
        receipt = pb.Receipt(
            round=ballot.body.round, ballot=ballot.digest, accepted=bits([digest != self.announced for digest in listed])
        )
        await self.submit(pb.KIND_RECEIPT, receipt)

    def _heartbeat(self) -> Statement[pb.Heartbeat]:
        return seal(self.identity, pb.KIND_HEARTBEAT, self.run.run_id, pb.Heartbeat(sequence=next(self.sequences)))

    async def _beat(self) -> None:
        while True:
            await self.coordinator.submit_once(self._heartbeat().envelope)
            await asyncio.sleep(1)

    async def submit(self, kind: pb.Kind, body: object) -> services.SubmitReply:
        return await self.coordinator.submit(seal(self.identity, kind, self.run.run_id, body))

    async def _open_base(self) -> bytes:
        """The base state of the open round, once somebody has announced it."""
        while self.chain.length not in self.bases:
            await self.moved.wait()
        return self.bases[self.chain.length]

    async def join(self) -> None:
        """Claim until a roster names us. We never computed the state: its root is in the others' contributions."""
        while self.identity.peer not in self.chain.head.roster:
            state = await self._open_base()
            head = self.chain.head
            claim = pb.Claim(serial=next(self.serials), round=head.round, head=head.digest, state=state)
            await self.submit(pb.KIND_CLAIM, claim)
            while self.chain.length == head.round:
                await self.moved.wait()

    async def misbehave(self, spoil: Spoil) -> int:
        """Join if need be, contribute once, spoiled; returns the round."""
        await self.join()
        base = await self._open_base()
        head = self.chain.head
        leaves = self.leaves()
        steps = self.run.rounds.inner_steps
        body = pb.Contribution(
            round=head.round,
            head=head.digest,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=1.0,
            samples_read=head.ledger.leases[self.identity.peer].counted + steps * self.run.training.batch_size,
            base_state=base,
        )
        spoil(self, body, leaves)
        body.leaves = body.leaves or self.store.put([canonical(leaves)])
        body.size = body.size or sum(leaf.size for leaf in leaves.leaves)
        body.norm = body.norm or norm_code(math.hypot(*(norm_of(code) for leaf in leaves.leaves for code in leaf.norms)))
        statement = seal(self.identity, pb.KIND_CONTRIBUTION, self.run.run_id, body)
        self.announced = statement.digest
        await self.coordinator.submit(statement)
        return int(body.round)

    @cache  # noqa: B019
    def payload(self, stage: int, scale: float = 1e-3) -> tuple[bytes, bytes]:
        """A well-formed payload of this stage, and its norm codes."""
        torch.set_num_threads(1)  # beside eight busy workers two threads would mostly wait for each other
        state = StageState(self.run, stage)
        state.feedback.normal_(std=scale)
        encoded = state.encode()
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
