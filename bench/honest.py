"""Peers that behave as a node without training: the node's own machine over real TLS and gRPC, with a pause for steps and
noise for payloads. A bench measures everything else with them."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio

from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.member import member, member_io
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.net import tls
from dilocox.transport.net.blob_server import PeerService, ServedRun
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.rpc import ChannelPool, create_server, fetch_blob
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["HonestPeer"]

BEAT_SECONDS = 2.0
PAYLOAD_BYTES = 1 << 16
AGAIN_SECONDS = 0.2


def state_root(trained: int) -> bytes:
    """Return the state root after `trained` commits that counted a cluster; it is equal for all peers."""
    return sha256(b"state", trained.to_bytes(8, "big"))


class HonestPeer:
    """Honest peer that claims, contributes, fetches and votes, until it is left: `async with HonestPeer(link, folder,
    step_seconds, records)`."""

    def __init__(self, link: JoinLink, folder: Path, step_seconds: float, records: dict[str, pb.PeerRecord]) -> None:
        """Store the settings. `records`: of all peers; each peer adds its own."""
        self._link, self._folder, self._step_seconds, self._records = link, folder, step_seconds, records
        self.identity = Identity(os.urandom(32))
        self.closed_at: list[float] = []
        """Time of each commit, monotonic."""
        self._sequences, self._speak = itertools.count(1), asyncio.Event()

    async def __aenter__(self) -> "HonestPeer":
        self._closing = AsyncExitStack()
        self._folder.mkdir(parents=True)
        certificate = tls.load_or_create(self._folder)
        server, port = await create_server("0.0.0.0:0", certificate)
        self.store = BlobStore(self._folder / "blobs")
        service = PeerService(self.store, CallerAuth(self._link.run_id, certificate.certificate_der))
        rpc.add_PeerServicer_to_server(service, server)
        await server.start()
        self._closing.push_async_callback(server.stop, 0)
        self.record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)
        self._records[self.identity.peer] = self.record
        self._channels = ChannelPool(self.identity, self._link.run_id)
        self._closing.push_async_callback(self._channels.close)
        self._coordinator = CoordinatorLink(
            self._link, PeerDirectory(None, self.identity, self._link.run_id, 1), self._channels
        )
        self.run, _ = await self._coordinator.run()
        self.chain = ChainFile(self._folder / "chain.db", self.run)
        self._closing.callback(self.chain.close)
        roster = ServedRun(is_member=lambda peer: peer in self.chain.head.cluster_by_peer, commit=self.chain.raw)
        service.serve(roster)
        self.state = member.start(self.run, self.identity.peer, self.chain.head)
        self._tasks = Tasks()
        self._closing.push_async_callback(self._tasks.close)
        for work, name in ((self._follow(), "follow"), (self._offer(), "offer"), (self._beat(), "beat")):
            self._tasks.start(work, name)
        self._know_state()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._closing.aclose()

    def _feed(self, event: member_io.Input) -> None:
        self.state, effects = member.step(self.state, event, time.monotonic())
        for effect in effects:
            match effect:
                case member_io.Sign(kind, body):
                    self._feed(member_io.Signed(seal(self.identity, kind, self.run.run_id, body)))
                case member_io.Judge(contribution):
                    self._tasks.start(self._judge(contribution), "judge")
                case member_io.Halt(why):
                    raise AssertionError(why)
        self._speak.set()

    def _know_state(self) -> None:
        head = self.chain.head
        self._feed(member_io.StateReady(head.round, state_root(head.trained), None))
        if self.state.on_roster:
            self._tasks.start(self._train(head.round), f"train {head.round}")

    async def _train(self, round: int) -> None:
        await asyncio.sleep(self._step_seconds)
        head = self.state.head
        if head.round != round:
            return
        leaves = await asyncio.to_thread(self.store.put, [os.urandom(PAYLOAD_BYTES)])
        steps = self.run.rounds.inner_steps
        self._feed(
            member_io.PhaseEnded(
                round=round,
                base=state_root(head.trained),
                inner_steps=steps,
                tokens=steps * self.run.tokens_per_step,
                loss=2.0,
                samples_read=head.ledger.leases[self.identity.peer].counted + steps * self.run.training.batch_size,
                leaves=leaves,
                size=PAYLOAD_BYTES,
                norm=norm_code(1.0),
                effective_rank=4.0,
                error=0.1,
            )
        )

    async def _judge(self, contribution: Statement[pb.Contribution]) -> None:
        """Accept a contribution when its bytes are here, with as many requests to its server as needed."""
        round = self.state.head.round
        while self.state.head.round == round:
            try:
                channel = self._channels.channel(self._records[contribution.peer])
                await fetch_blob(channel, self.store, contribution.body.leaves)
            except (RemoteError, grpc.aio.AioRpcError):
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self._feed(member_io.Judged(contribution.digest, (pb.REASON_UNSPECIFIED, 0)))
                return

    async def _follow(self) -> None:
        away: Callable[[], None] = lambda: self._feed(member_io.Away())  # noqa: E731
        async for event in self._coordinator.watch(lambda: self.chain.length, self._heartbeat, away):
            if not self.state.connected:
                self._feed(member_io.Connected())
            if event.WhichOneof("event") != "statement" or event.statement.kind == pb.KIND_PEER_RECORD:
                continue
            if event.statement.kind != pb.KIND_COMMIT:
                self._feed(
                    member_io.Seen(open_envelope(event.statement, self.run.run_id, (pb.KIND_BALLOT, pb.KIND_CONTRIBUTION)))
                )
            elif pb.Commit.FromString(event.statement.body).round == self.chain.length:
                self.closed_at.append(time.monotonic())
                commit = await asyncio.to_thread(self.chain.append, event.statement)
                self._feed(member_io.Committed(commit, self.chain.head))
                self._know_state()

    async def _offer(self) -> None:
        while True:
            self._speak.clear()
            for statement in member.offers(self.state):
                answer = await self._coordinator.submit_once(statement.envelope)
                if answer is not None:
                    self._feed(member_io.Answered(statement, answer.outcome, answer.reason, answer.detail, answer.head))
            await self._speak.wait()

    def _heartbeat(self) -> Statement[pb.Heartbeat]:
        body = pb.Heartbeat(sequence=next(self._sequences), head=self.chain.head.digest)
        return seal(self.identity, pb.KIND_HEARTBEAT, self.run.run_id, body)

    async def _beat(self) -> None:
        while True:
            await self._coordinator.submit_once(self._heartbeat().envelope)
            self._speak.set()  # send again the statements that the coordinator does not have
            await asyncio.sleep(BEAT_SECONDS)
