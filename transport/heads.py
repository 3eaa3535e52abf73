"""Which chain the other side has: the newest commit travels with what peers ask of each other, and with what they answer."""

from collections.abc import Iterable
from typing import Protocol

from google.protobuf.message import DecodeError

from dilocox.protocol.pb import services_pb2 as services

__all__ = ["HeadSource", "Heads"]

HEADER = "dilocox-head-bin"


class HeadSource(Protocol):
    def tip(self) -> services.Tip:
        """Return the newest commit of our chain. Called in threads of gRPC."""

    def heard(self, peer: str, tip: services.Tip) -> None:
        """Take what a peer, whose identity is proven, says of its chain; the chain itself is not proven."""


class _Unknown:
    """Says nothing and drops what it hears: the run is not known yet."""

    def tip(self) -> services.Tip:
        return services.Tip()

    def heard(self, peer: str, tip: services.Tip) -> None:
        pass


class Heads:
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
