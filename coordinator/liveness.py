"""Liveness: a peer is live while its stream is open and heartbeats arrive.

A broken stream means absence at once: a kernel closes the sockets of a killed process. Silence on an open stream means
absence after the run's liveness window, for example after a power or network failure. Replays prove nothing: every
heartbeat is signed, and its sequence is higher than every earlier one. A peer that reports a missing host of its
cluster is absent, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.wire.messages import Statement

__all__ = ["Liveness"]


@dataclass
class Sign:
    """Last heartbeat of a peer."""

    heard_at: float
    heartbeat: pb.Heartbeat
    streams: int = 0
    length: int = 0
    """Commits that it held when its newest stream began."""


@dataclass
class Liveness:
    window_seconds: float
    clock: Callable[[], float]
    """Monotonic."""
    signs: dict[str, Sign] = field(default_factory=dict)

    def hear(self, heartbeat: Statement[pb.Heartbeat]) -> bool:
        """Return whether the heartbeat is new. Peers without a stream are remembered up to a bound only."""
        sign = self.signs.get(heartbeat.peer)
        if sign is None:
            if len(self.signs) >= limits.KNOWN_PEERS:
                return False
            self.signs[heartbeat.peer] = Sign(self.clock(), heartbeat.body)
            return True
        if heartbeat.body.sequence <= sign.heartbeat.sequence:
            return False
        sign.heard_at, sign.heartbeat = self.clock(), heartbeat.body
        return True

    def open_stream(self, peer: str, length: int) -> bool:
        """Return whether the stream counts: the peer has sent a heartbeat, and is within the bound."""
        sign = self.signs.get(peer)
        if sign is None:
            return False
        sign.streams, sign.length = sign.streams + 1, length
        return True

    def close_stream(self, peer: str) -> None:
        self.signs[peer].streams -= 1

    def alive(self, peer: str) -> bool:
        sign = self.signs.get(peer)
        if sign is None or sign.heartbeat.incomplete:
            return False
        return sign.streams > 0 and self.clock() - sign.heard_at <= self.window_seconds

    def forget(self, keep: Iterable[str]) -> None:
        """Forget peers that have no stream and that the caller does not need; their sequence starts again with their next
        stream."""
        wanted = set(keep)
        for peer in [peer for peer, sign in self.signs.items() if not sign.streams and peer not in wanted]:
            del self.signs[peer]

    def view(self) -> services.PresenceList:
        return services.PresenceList(
            peers=[
                services.Presence(
                    peer=peer,
                    present=self.alive(peer),
                    round=sign.heartbeat.round,
                    step=sign.heartbeat.step,
                    loss=sign.heartbeat.loss,
                    tokens_per_second=sign.heartbeat.tokens_per_second,
                )
                for peer, sign in sorted(self.signs.items())
            ]
        )
