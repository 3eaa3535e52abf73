"""Forks: two chains of one run, found when peers with different chains meet, proven by the coordinator's two signatures.

Calls between peers contain the newest commit (head gossip). A peer with a chain of the same length requests a different
commit. If the coordinator signed both, they are stored beside the chain, and the node stops. It does not start on that
chain again until the run's owner has appointed a coordinator, and so chosen one of the two.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
from google.protobuf.message import DecodeError

from dilocox.node.exchange.downloader import Finder
from dilocox.protocol import limits
from dilocox.protocol.consensus import terms
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.files import write_atomically

__all__ = ["Forks", "check_forks", "follow_owner", "is_ours", "proof_of_fork", "replaced"]

log = logging.getLogger(__name__)

ASK_SECONDS = 30.0
"""Timeout for a commit of at most `limits.COMMIT_BYTES`."""


def proof_of_fork(chain: ChainFile, round: int, other: pb.Envelope) -> LocalError:
    """The error that ends this node where `other` and our commit for `round` prove two chains; the proof is then on disk. Raises
    RemoteError where they do not, or where the owner has said since which chain is the run's."""
    ours = chain.commit(round)
    assert ours is not None, "it is not above this node's head"
    appointment = chain.appointment_of(ours.body.term)
    fork = pb.Fork(first=ours.envelope, second=other, appointment=appointment.envelope if appointment else None)
    told = open_envelope(other, chain.manifest.run_id, (pb.KIND_COMMIT,)).body
    if told.HasField("appointment") and (error := replaced(chain, told.appointment)) is not None:
        return error
    _, term = terms.forked_round(chain.manifest, fork)
    if term < chain.term:
        raise RemoteError(pb.REASON_STALE_ROUND, "the run's owner has appointed a coordinator since")
    path = chain.path.parent / f"fork-{round}.pb"
    write_atomically(path, canonical(fork))
    return _error(round, path)


async def is_ours(chain: ChainFile, commit: Statement[pb.Commit]) -> bool:
    """Return whether this chain contains the commit; false: it is from a later round. If this chain has another one,
    return or raise as `proof_of_fork`."""
    round = commit.body.round
    if round >= chain.length:
        return False
    known = await asyncio.to_thread(chain.commit, round)
    if known is not None and known.digest != commit.digest:
        raise await asyncio.to_thread(proof_of_fork, chain, round, commit.envelope)
    return True


def check_forks(chain: ChainFile) -> None:
    """Raise LocalError if a proof is beside the chain, and the owner has not chosen a chain since. Changes nothing."""
    for path in sorted(chain.path.parent.glob("fork-*.pb")):
        try:
            round, term = terms.forked_round(chain.manifest, pb.Fork.FromString(path.read_bytes()))
        except (RemoteError, DecodeError) as error:
            log.warning("%s proves nothing: %s", path, error)
        else:
            if term >= chain.term:
                raise _error(round, path)


def replaced(chain: ChainFile, envelope: pb.Envelope) -> LocalError | None:
    """Return the error that ends this node if the owner appointed another coordinator; None if the appointment is known or
    not the owner's. The next start follows it."""
    newest = chain.appointment
    if newest is not None and newest.envelope.body == envelope.body:
        return None
    try:
        appointment = terms.open_appointment(chain.manifest, envelope)
    except RemoteError:  # unknown peers may send anything
        return None
    if appointment.body.term <= chain.term:
        return None
    return LocalError(
        f"the run's owner has appointed {appointment.body.coordinator} as coordinator from round "
        f"{appointment.body.round} on. Start again, with the new join link if that is another coordinator."
    )


async def follow_owner(
    chain: ChainFile,
    coordinator: str,
    appointment: Statement[pb.Appointment] | None,
    ask: Callable[[int], Awaitable[Statement[pb.Commit]]],
) -> None:
    """Remove commits that the owner rejects, before anything builds on this chain. `coordinator`: the link's; `ask`:
    returns one of its commits. Raises LocalError if the link names a coordinator that the owner has replaced."""
    if appointment is not None and await asyncio.to_thread(chain.appoint, appointment.envelope):
        log.warning(
            "the run's owner chose another chain: %d commits of this node remain, the others were moved aside", chain.length
        )
    if chain.signer != coordinator:
        raise LocalError(f"the run's owner has appointed {chain.signer} as coordinator since: use the new join link")
    if chain.length and chain.head.term < chain.term:  # we are behind: on the chain that was named?
        newest = await ask(chain.length - 1)
        if newest.digest != chain.head.digest:
            log.warning("the run's owner chose another chain than this node's: it was moved aside")
            await asyncio.to_thread(chain.give_up_from, 0)


def _error(round: int, path: Path) -> LocalError:
    return LocalError(
        f"the coordinator signed two different commits for round {round} and cannot be trusted. Send {path} to "
        "the run's owner: `dilocox owner appoint` ends this. To follow this node's chain anyway, move "
        "that file away."
    )


class Forks:
    """Comparison of other peers' chains with this one."""

    def __init__(self, chain: ChainFile, directory: Finder, channels: ChannelPool, tasks: Tasks) -> None:
        self._chain, self._directory, self._channels, self._tasks = chain, directory, channels, tasks
        self._same: OrderedDict[bytes, None] = OrderedDict()
        """Digests of commits that are ours too."""
        self.comparing: set[str] = set()
        """Peers: with each one at a time, however often it calls."""

    def tip(self) -> services.Tip:
        head = self._chain.head
        return services.Tip(round=head.round, head=head.digest, appointment=self._chain.newest_word)

    def heard(self, peer: str, tip: services.Tip) -> None:
        """Take the head of a caller or a called peer; those of roster members are checked."""
        head = self._chain.head
        if tip.HasField("appointment") and tip.appointment != self._chain.newest_word:
            self._tasks.start(self._look_at(tip.appointment), f"appointment from {short(peer)}")
        if peer not in head.cluster_by_peer or not 0 < tip.round <= head.round or tip.head == head.digest:
            return
        if tip.head not in self._same and peer not in self.comparing:
            self.comparing.add(peer)
            self._tasks.start(self._compare(peer, tip), f"compare with {short(peer)}")

    async def _look_at(self, appointment: pb.Envelope) -> None:
        if (error := await asyncio.to_thread(replaced, self._chain, appointment)) is not None:
            raise error

    async def _compare(self, peer: str, tip: services.Tip) -> None:
        try:
            raw = await asyncio.to_thread(self._chain.raw, tip.round - 1)
            assert raw is not None, "it is not above this node's head"
            ours = pb.Envelope.FromString(raw)
            if sha256(ours.key, ours.body) == tip.head:
                self._same[tip.head] = None
                if len(self._same) > limits.CLUSTERS:
                    self._same.popitem(last=False)
                return
            record = await self._directory.find(peer)
            if record is None or not record.address:
                raise RemoteError(pb.REASON_UNAVAILABLE, "it is not reachable")
            request = services.CommitRequest(round=tip.round - 1)
            theirs = await rpc.PeerStub(self._channels.channel(record)).GetCommit(request, timeout=ASK_SECONDS)
            raise await asyncio.to_thread(proof_of_fork, self._chain, tip.round - 1, theirs)
        except (RemoteError, grpc.aio.AioRpcError) as error:
            why = error.detail if isinstance(error, RemoteError) else error.code().name.lower()
            log.warning("%s reports another chain, and proves nothing: %s", short(peer), why)
        finally:
            self.comparing.discard(peer)
