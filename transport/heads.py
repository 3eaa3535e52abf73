"""Which chain the other side holds: the newest commit rides what peers ask of each other, and what they answer when they serve."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dilocox.protocol.pb import services_pb2 as services

__all__ = ["Heads"]

HEADER = "dilocox-head-bin"


@dataclass
class Heads:
    """Both ends of it, in one process; silent until the run is known."""

    ours: Callable[[], services.Tip] = services.Tip
    """Asked in threads of gRPC."""
    heard: Callable[[str, services.Tip], None] = lambda peer, tip: None
    """What a peer, who is proven, says of its chain; the chain itself is not."""

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((HEADER, self.ours().SerializeToString()),)

    def take(self, peer: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Look through what came with a call. Whatever is there, it raises nothing."""
        for key, value in metadata or ():
            if key == HEADER and isinstance(value, bytes):
                try:
                    self.heard(peer, services.Tip.FromString(value))
                except DecodeError:
                    continue
