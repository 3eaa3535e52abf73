"""Head gossip: requests and answers between peers contain the newest commit of each side."""

from collections.abc import Iterable
from typing import Protocol

from google.protobuf.message import DecodeError

from dilocox.protocol.pb import services_pb2 as services

__all__ = ["HeadGossip", "HeadSource"]

HEADER = "dilocox-head-bin"


class HeadSource(Protocol):
    def tip(self) -> services.Tip:
        """Return the newest commit of our chain. Called in threads of gRPC."""

    def heard(self, peer: str, tip: services.Tip) -> None:
        """Take a peer's head. The peer's identity is proven, the chain is not."""


class _Unknown:
    """Gossip of a peer that does not know the run yet: it sends nothing and ignores everything."""

    def tip(self) -> services.Tip:
        return services.Tip()

    def heard(self, peer: str, tip: services.Tip) -> None:
        pass


class HeadGossip:
    """Both directions, in one process; silent until the run is known."""

    def __init__(self) -> None:
        self._source: HeadSource = _Unknown()

    def open(self, source: HeadSource) -> None:
        """Exchange the heads of this chain from now on."""
        self._source = source

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((HEADER, self._source.tip().SerializeToString()),)

    def take(self, peer: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Read the head that came with a call. Raises nothing."""
        for key, value in metadata or ():
            if key == HEADER and isinstance(value, bytes):
                try:
                    self._source.heard(peer, services.Tip.FromString(value))
                except DecodeError:
                    continue
