"""Stream quotas: some for each known peer, and one shared quota for unknown peers with a lower limit per address."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["Streams"]


@dataclass(eq=False)
class Stream:
    """Open stream of a caller."""

    peer: str
    """Empty: it does not say who it is."""
    address: str


class Streams:
    def __init__(self, knows: Callable[[str], bool], may_read: Callable[[str], bool]) -> None:
        """`knows`: whether a peer takes part in the run; `may_read`: whether it may follow it."""
        self._knows, self._may_read = knows, may_read
        self._open: list[Stream] = []

    @contextmanager
    def joined(self, peer: str, address: str) -> Iterator[None]:
        """Count a stream while the context is open. Raises RemoteError if the quota is used up."""
        stream = Stream(peer, address)
        self._check_room(stream)
        self._open.append(stream)
        try:
            yield
        finally:
            self._open.remove(stream)

    def _check_room(self, stream: Stream) -> None:
        if not (self._knows(stream.peer) or self._may_read(stream.peer)):
            raise RemoteError(pb.REASON_NOT_ADMITTED, "this run is not public")
        if self._knows(stream.peer):
            if sum(other.peer == stream.peer for other in self._open) >= limits.STREAMS_PER_MEMBER:
                raise RemoteError(pb.REASON_RATE, f"{limits.STREAMS_PER_MEMBER} streams of this peer are open")
            return
        strangers = [other for other in self._open if not self._knows(other.peer)]
        here = sum(other.address == stream.address for other in strangers)
        if len(strangers) >= limits.SPECTATORS or here >= limits.SPECTATORS_PER_ADDRESS:
            raise RemoteError(pb.REASON_RATE, "the limit of unknown peers' streams is reached")
