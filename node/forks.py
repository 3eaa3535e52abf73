"""Two chains of one run: found when peers that hold them meet, proven by the coordinator's two signatures, the end of this node.

Calls between peers say which commit is the newest (transport/heads.py). Whose chain is as long asks for one that is not its own;
when the coordinator signed both, they are kept beside the chain, and the node does not start on it again: which of the two is the
run's is for its owner to say.
"""

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

import grpc.aio
from google.protobuf.message import DecodeError

from dilocox.node.exchange import Finder
from dilocox.protocol import chain, limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import canonical
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.files import write_atomically
from dilocox.transport.rpc import ChannelPool
from dilocox.transport.tasks import Tasks

__all__ = ["Forks", "check_forks", "proof_of_fork"]

log = logging.getLogger(__name__)

ASK_SECONDS = 30.0
"""For a commit of at most `limits.COMMIT_BYTES`."""


def proof_of_fork(manifest: Manifest, folder: Path, first: pb.Envelope, second: pb.Envelope) -> LocalError:
    """The error that ends this node, with its proof on disk. Raises RemoteError where the two prove nothing."""
    fork = pb.Fork(first=first, second=second)
    round = chain.forked_round(manifest, fork)
    path = folder / f"fork-{round}.pb"
    write_atomically(path, canonical(fork))
    return _error(round, path)


def check_forks(manifest: Manifest, folder: Path) -> None:
    """Raises LocalError where a proof lies beside the chain. Changes nothing."""
    for path in sorted(folder.glob("fork-*.pb")):
        try:
            round = chain.forked_round(manifest, pb.Fork.FromString(path.read_bytes()))
        except (RemoteError, DecodeError) as error:
            log.warning("%s proves nothing: %s", path, error)
        else:
            raise _error(round, path)


def _error(round: int, path: Path) -> LocalError:
    return LocalError(
        f"the coordinator signed two different commits for round {round}: it cannot be trusted. Both are in {path}: show them"
        " to the run's owner. Move that file away to follow this node's chain all the same."
    )


class Forks:
    """Compares the chains that others hold with ours."""

    def __init__(self, chain: ChainFile, directory: Finder, channels: ChannelPool, tasks: Tasks) -> None:
        self._chain, self._directory, self._channels, self._tasks = chain, directory, channels, tasks
        self._same: OrderedDict[bytes, None] = OrderedDict()
        """Digests of commits that are ours too."""
        self.comparing: set[str] = set()
        """Peers: with each one at a time, however often it calls."""

    def standing(self) -> services.Standing:
        head = self._chain.head
        return services.Standing(round=head.round, head=head.digest)

    def heard(self, peer: str, standing: services.Standing) -> None:
        """What a caller, or who was called, holds: members of the roster are believed to hold something."""
        head = self._chain.head
        if peer not in head.cluster_by_peer or not 0 < standing.round <= head.round or standing.head == head.digest:
            return
        if standing.head not in self._same and peer not in self.comparing:
            self.comparing.add(peer)
            self._tasks.start(self._compare(peer, standing), f"compare with {short(peer)}")

    async def _compare(self, peer: str, standing: services.Standing) -> None:
        try:
            raw = await asyncio.to_thread(self._chain.raw, standing.round - 1)
            assert raw is not None, "it is not above our head"
            ours = pb.Envelope.FromString(raw)
            if sha256(ours.key, ours.body) == standing.head:
                self._same[standing.head] = None
                if len(self._same) > limits.CLUSTERS:
                    self._same.popitem(last=False)
                return
            record = await self._directory.find(peer)
            if record is None or not record.address:
                raise RemoteError(pb.REASON_UNAVAILABLE, "nobody can dial it")
            request = services.CommitRequest(round=standing.round - 1)
            theirs = await rpc.PeerStub(self._channels.channel(record)).GetCommit(request, timeout=ASK_SECONDS)
            raise await asyncio.to_thread(proof_of_fork, self._chain.manifest, self._chain.path.parent, ours, theirs)
        except (RemoteError, grpc.aio.AioRpcError) as error:
            why = error.detail if isinstance(error, RemoteError) else error.code().name.lower()
            log.warning("%s says that it holds another chain, and proves nothing: %s", short(peer), why)
        finally:
            self.comparing.discard(peer)
