"""A peer that speaks the protocol well enough to be admitted, and then misbehaves. Real DHT, TLS and gRPC."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.outer.state import StageState
from dilocox.protocol.crypto import Identity
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.messages import seal
from dilocox.protocol.payload import Layout
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport import tls
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.dht import Dht, DhtSettings
from dilocox.transport.network import choose_port, multiaddr
from dilocox.transport.presence import Directory
from dilocox.transport.rpc import BlobService, ChannelPool, create_server
from dilocox.transport.tasks import Tasks

Spoil = Callable[["HostilePeer", pb.Contribution], None]


class HostilePeer:
    """`async with HostilePeer(link, folder) as peer: await peer.misbehave(spoil)`."""

    def __init__(self, link: JoinLink, folder: Path) -> None:
        self.link, self.folder = link, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.identity = Identity(os.urandom(32))
        self.store = BlobStore(folder / "blobs")
        self.bases: dict[int, list[bytes]] = {}
        self.moved = asyncio.Event()

    async def __aenter__(self) -> "HostilePeer":
        self.tasks = Tasks()
        certificate = tls.load_or_create(self.folder)
        self.server, port = await create_server("127.0.0.1:0", certificate)
        rpc.add_PeerServicer_to_server(BlobService(self.store), self.server)
        await self.server.start()
        dht_port = choose_port()
        listen = f"/ip4/127.0.0.1/tcp/{dht_port}"
        dht = Dht(DhtSettings(self.link.run_id, self.identity, self.folder, listen, self.link.dht_addresses))
        self.directory = Directory(dht, self.identity, self.link.run_id)
        self.channels = ChannelPool()
        self.tasks.start(dht.run(), "dht")
        addresses = [multiaddr("127.0.0.1", dht_port, self.identity.peer)]
        make = lambda: self.directory.seal_record(f"127.0.0.1:{port}", certificate.certificate_der, "mallory", addresses)  # noqa: E731
        self.tasks.start(self.directory.publish_forever(make), "publish")
        self.coordinator = CoordinatorLink(self.link, self.directory, self.channels)
        self.run, _ = await self.coordinator.manifest()
        self.chain = ChainFile(self.folder / "chain.db", self.run, self.link.coordinator)
        self.tasks.start(self._follow(), "follow")
        self.tasks.start(self._beat(), "beat")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.tasks.close()
        await self.channels.close()
        await self.server.stop(grace=0)
        self.chain.close()

    async def _follow(self) -> None:
        """Keep the chain, learn the open round's base states from others' contributions, and cast an empty vote."""
        async for event in self.coordinator.watch(lambda: self.chain.length):
            if event.WhichOneof("event") != "statement":
                continue
            kind, raw = event.statement.kind, event.statement.body
            if kind == pb.KIND_COMMIT and pb.Commit.FromString(raw).round == self.chain.length:
                self.chain.append(event.statement)
            elif kind == pb.KIND_CONTRIBUTION and event.statement.key != self.identity.key:
                body = pb.Contribution.FromString(raw)
                self.bases[body.round] = [payload.base_state for payload in body.payloads]
            elif kind == pb.KIND_BALLOT:
                receipt = pb.Receipt(round=self.chain.head.round, head=self.chain.head.digest)
                self.tasks.start(self.submit(pb.KIND_RECEIPT, receipt), "vote")
            self.moved.set()
            self.moved.clear()

    async def _beat(self) -> None:
        for sequence in itertools.count(int(time.time() * 1000)):
            await self.submit(pb.KIND_HEARTBEAT, pb.Heartbeat(sequence=sequence))
            await asyncio.sleep(1)

    async def submit(self, kind: pb.Kind, body: object) -> services.SubmitReply:
        return await self.coordinator.submit(seal(self.identity, kind, self.run.run_id, body))

    async def _open_bases(self) -> list[bytes]:
        """The base states of the open round, once somebody has announced them."""
        while self.chain.length not in self.bases:
            await self.moved.wait()
        return self.bases[self.chain.length]

    async def join(self) -> None:
        """Claim until a roster names us. We never computed the state: its digest is in the others' contributions."""
        while self.identity.peer not in self.chain.head.roster:
            states = [pb.StageState(stage=s, digest=d) for s, d in enumerate(await self._open_bases())]
            claim = pb.Claim(
                round=self.chain.head.round,
                head=self.chain.head.digest,
                cluster=self.identity.peer,
                first_stage=0,
                stage_count=self.run.model.stages,
                states=states,
            )
            await self.submit(pb.KIND_CLAIM, claim)
            number = self.chain.length
            while self.chain.length == number:
                await self.moved.wait()

    async def misbehave(self, spoil: Spoil) -> int:
        """Join if need be, contribute once, spoiled; returns the round."""
        await self.join()
        body = self.contribution(await self._open_bases())
        spoil(self, body)
        await self.submit(pb.KIND_CONTRIBUTION, body)
        return body.round

    @cache  # noqa: B019
    def payload(self, stage: int, scale: float = 1e-3) -> tuple[bytes, float]:
        """A well-formed payload of this stage, and its norm."""
        torch.set_num_threads(1)  # beside eight busy workers two threads would mostly wait for each other
        state = StageState(self.run, stage)
        state.feedback.normal_(std=scale)
        encoded = state.encode(None)
        return encoded.raw, encoded.norm

    def layouts(self, stage: int) -> tuple[Layout, ...]:
        return StageState(self.run, stage).layout().tensors

    def contribution(self, bases: list[bytes]) -> pb.Contribution:
        head = self.chain.head
        lease = head.ledger.leases[self.identity.peer]
        steps = self.run.rounds.inner_steps
        body = pb.Contribution(
            round=head.round,
            head=head.digest,
            cluster=self.identity.peer,
            inner_steps=steps,
            tokens=steps * self.run.tokens_per_step,
            loss=1.0,
            samples_read=lease.counted + steps * self.run.training.batch_size,
        )
        for stage, base in enumerate(bases):
            body.payloads.add(stage=stage, base_state=base)
            self.serve(body, stage, *self.payload(stage))
        return body

    def serve(self, body: pb.Contribution, stage: int, raw: bytes, norm: float) -> None:
        """Announce and serve these bytes as the stage's payload."""
        entry = body.payloads[stage]
        entry.digest, entry.size, entry.norm = self.store.put([raw]), len(raw), norm
