"""One peer of `python -m bench.exchange`, in a separate process: it reads commands from stdin, and answers on stdout.

ours       encodes, stores and announces (the bench forwards announcements, as a coordinator does); then fetches,
           checks and applies
gloo       torch.distributed.all_reduce of the same parameters in float32
hivemind   hivemind's averager, with the same parameters in float32, sent unchanged or in 8 bits; its group is
           complete before the time begins
"""

import asyncio
import base64
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.lab import announcement
from bench.report import load_preset
from bench.sections import model_section
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.payload_checker import PayloadChecker
from dilocox.node.outer.state import StageState
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.crypto import Identity
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import canonical, open_envelope, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.net import tls
from dilocox.transport.net.blob_server import PeerService, ServedRun
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.data_directory import load_identity

__all__ = ["main", "run_of"]

WIDTHS = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "stages": 1,
}
LAYERS, QUICK_LAYERS = 8, 1
BASE = bytes(32)
"""State root that all peers built on, and the previous commit."""
DEVIATION = 1e-3
"""Standard deviation of a pseudo-gradient's values."""


def run_of(layers: int) -> Manifest:
    """Return a run with 26.0M parameters in one stage, and the codec of `llama-125m` and all smaller presets."""
    preset = load_preset("llama-125m")
    model = model_section({**WIDTHS, "num_hidden_layers": layers}, preset.model.model_dump())
    return Manifest.model_validate({**preset.model_dump(), "model": model})


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def told() -> dict[str, Any]:
    """Return the next command; at the end of input the process ends."""
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        sys.exit(0)
    return json.loads(line)


def gradient(size: int, rank: int, round: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * round + rank)).mul_(DEVIATION)


class Everybody:
    """Finder that knows the address of every peer of the bench."""

    def __init__(self, records: dict[str, str]) -> None:
        self._records = {peer: pb.PeerRecord.FromString(base64.b64decode(record)) for peer, record in records.items()}

    @property
    def peers(self) -> list[str]:
        return list(self._records)

    async def find(self, peer: str) -> pb.PeerRecord | None:
        return self._records.get(peer)

    async def look_up(self, peer: str) -> None:
        pass


class Ours:
    def __init__(self, run: Manifest, identity: Identity, store: BlobStore, checker: PayloadChecker) -> None:
        self._run, self._identity, self._store, self._checker = run, identity, store, checker
        self._state = StageState(run, 0)

    def encode(self, rank: int, round: int) -> str:
        """Return a signed contribution, whose payload and index are in the store."""
        owner = owner_of(self._run.run_id, self._identity.peer, round, 0)
        stage = self._state.encode(owner=owner)
        self._store.put([stage.raw])
        sent = announcement([stage], 1)
        body = pb.Contribution()
        body.CopyFrom(sent.contribution)
        body.round, body.base_state, body.head = round, BASE, BASE
        body.leaves = self._store.put([canonical(pb.Leaves(leaves=sent.leaves))])
        sealed = seal(self._identity, pb.KIND_CONTRIBUTION, self._run.run_id, body)
        return base64.b64encode(sealed.envelope.SerializeToString()).decode()

    async def take(self, contributions: list[str]) -> None:
        """Judge all of them, and apply their payloads."""
        sealed = [base64.b64decode(each) for each in contributions]
        opened = [open_envelope(raw, self._run.run_id, (pb.KIND_CONTRIBUTION,)) for raw in sealed]
        keep = self._run.compression.keep
        verdicts = await asyncio.gather(*(self._checker.judge(each, BASE, keep) for each in opened))
        if refused := [reason for reason, _ in verdicts if reason]:
            raise SystemExit(f"a payload was refused: {refused}")
        leaves = [
            read_leaves(self._run, self._store.read(each.body.leaves)) for each in sorted(opened, key=lambda each: each.peer)
        ]
        payloads = [self._store.view(leaf.digest) for [leaf] in leaves]
        await asyncio.to_thread(self._state.apply, payloads, [1] * len(payloads))

    def begin(self, rank: int, round: int) -> None:
        self._state.feedback.copy_(gradient(self._state.size, rank, round))

    @property
    def digest(self) -> str:
        return digest_of([self._state.state_bytes()]).hex()


async def ours(rank: int, address: str, folder: Path, run: Manifest) -> None:
    folder.mkdir()
    identity, store = load_identity(folder / "peer.key"), BlobStore(folder / "blobs")
    certificate = tls.load_or_create(folder)
    server, port = await create_server(f"{address}:0", certificate)
    service = PeerService(store, CallerAuth(run.run_id, certificate.certificate_der))
    service.serve(ServedRun(is_member=lambda peer: True))
    rpc.add_PeerServicer_to_server(service, server)
    await server.start()
    record = pb.PeerRecord(address=f"{address}:{port}", certificate=certificate.certificate_der)
    say(peer=identity.peer, record=base64.b64encode(record.SerializeToString()).decode())
    directory = Everybody((await told())["records"])
    channels = ChannelPool(identity, run.run_id)
    roster = {name: Cluster(name, (), joined=1) for name in directory.peers}
    downloader = Downloader(identity.peer, store, directory, channels, lambda: roster)
    peer = Ours(run, identity, store, PayloadChecker(run, downloader, HostedStages([0]), lambda: roster))
    while True:
        round = (await told())["begin"]
        peer.begin(rank, round)
        say(ready=True)
        await told()
        began = time.monotonic()
        said = await asyncio.to_thread(peer.encode, rank, round)
        encoded = time.monotonic() - began
        say(said=said)
        await peer.take((await told())["contributions"])
        say(done=True, encode_seconds=encoded, sent=service.bytes_sent)
        await told()
        say(result=peer.digest)


async def collective(rank: int, size: int, prepare: Callable[[torch.Tensor, int], Callable[[], torch.Tensor]]) -> None:
    """Run a collective exchange. `prepare` returns the function that exchanges a tensor, when all peers are ready."""
    while True:
        round = (await told())["begin"]
        exchange = await asyncio.to_thread(prepare, gradient(size, rank, round), round)
        say(ready=True)
        await told()
        mean = await asyncio.to_thread(exchange)
        say(done=True)
        await told()
        say(result=[round, *mean[:: max(1, size // 16)].tolist()])


async def gloo(rank: int, peers: int, folder: Path, size: int) -> None:
    store = dist.FileStore(str(folder.parent / "gloo"), peers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=peers)

    def prepare(values: torch.Tensor, round: int) -> Callable[[], torch.Tensor]:
        def exchange() -> torch.Tensor:
            dist.all_reduce(values)
            return values.div_(peers)

        return exchange

    say(peer=str(rank))
    await told()
    await collective(rank, size, prepare)


async def hivemind(rank: int, peers: int, address: str, size: int, bits: int) -> None:
    from bench.averagers import Averager

    with redirect_stdout(sys.stderr):
        averager = Averager(address, size, peers, bits)
    say(peer=str(rank), record=averager.address)
    records = (await told())["records"]
    with redirect_stdout(sys.stderr):
        averager.meet([record for other, record in records.items() if other != str(rank)])
    await collective(rank, size, averager.prepare)


def main() -> None:
    kind, rank, peers, address, folder, layers = sys.argv[1:]
    torch.set_num_threads(1)
    run = run_of(int(layers))
    size = StageState(run, 0).size
    place = Path(folder) / rank
    if kind == "ours":
        asyncio.run(ours(int(rank), address, place, run))
    elif kind == "gloo":
        asyncio.run(gloo(int(rank), int(peers), place, size))
    else:
        asyncio.run(hivemind(int(rank), int(peers), address, size, 8 if kind.endswith("8 bit") else 32))


if __name__ == "__main__":
    main()
