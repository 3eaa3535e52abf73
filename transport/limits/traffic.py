"""Traffic of a daemon: its limits by the hour, and its bytes by kind.

Counted are the bytes of messages, without the overhead of TLS and HTTP/2. Not counted: the DHT, and tensors between the
workers of a cluster.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakSet

import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.schedule import Local, changes_at

__all__ = ["Allowance", "CountedChannel", "Limit", "Moved", "Traffic"]

KINDS = {
    "Fetch": "blob",
    "Push": "blob",
    "GetShare": "blob",
    "GetCommit": "chain",
    "Lead": "cluster",
    "Attestor": "attestation",
    "Reach": "reach",
}
"""Kind of a call, by its method or service; all others are with the coordinator."""
SAID = "coordination"


def kind_of(path: str) -> str:
    """Return the kind of a call such as /dilocox.v1.Peer/Fetch."""
    service, _, method = path.rpartition("/")
    return KINDS.get(method) or KINDS.get(service.rpartition(".")[2], SAID)


class Allowance(NamedTuple):
    """Limit of a link at a time."""

    bytes_per_second: float | None
    """Bytes per second; None: no limit."""
    until: float | None
    """End of the limit, in seconds since 1970; None: not within a day."""


class Limit:
    """Token bucket over all bytes of one direction."""

    def __init__(
        self, rates: Rates | None = None, local: Local = datetime.fromtimestamp, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since 1970, of which `local` makes the hour."""
        self._rates, self._local, self._clock = rates or Rates(), local, clock
        self._free_at = 0.0
        self.spent = 0
        """Bytes so far."""

    @property
    def bytes_per_second(self) -> float | None:
        """Now; None: no limit."""
        return self._rates.bytes_per_second(self._local(self._clock()))

    def now(self) -> Allowance:
        until = (
            changes_at(self._rates.bytes_per_second, self._clock(), self._local) if self._rates.timed_bytes_per_second else None
        )
        return Allowance(self.bytes_per_second, until)

    async def spend(self, size: int) -> float:
        """Wait until these bytes may pass; return the seconds that it took. Other transfers may go first."""
        waited = 0.0
        for start in range(0, size, limits.FRAME_BYTES):
            waited += await self._spend(min(limits.FRAME_BYTES, size - start))
        return waited

    async def _spend(self, size: int) -> float:
        rate = self.bytes_per_second
        if rate is None:
            self.spent += size
            return 0.0
        now, seconds = time.monotonic(), size / rate
        self._free_at = max(self._free_at, now) + seconds
        waited = self._free_at - now
        try:
            await asyncio.sleep(waited)
        except asyncio.CancelledError:
            self._free_at -= seconds  # it was not sent
            raise
        self.spent += size
        return waited


class Moved(NamedTuple):
    """Bytes of a round, from one commit to the next."""

    round: int
    sent: int
    received: int


class Traffic:
    """Traffic of one daemon."""

    def __init__(self, upload: Rates | None = None, download: Rates | None = None) -> None:
        self.upload, self.download = Limit(upload), Limit(download)
        self.bytes: Counter[tuple[str, str]] = Counter()
        """Bytes by direction (sent, received) and kind."""
        self.last_round: Moved | None = None
        """The last that was open here from its beginning to its end."""
        self._began: Moved | None = None

    def of(self, direction: str) -> Mapping[str, int]:
        """Return the bytes of a direction by kind."""
        return {kind: size for (way, kind), size in sorted(self.bytes.items()) if way == direction}

    def closed(self, round: int) -> None:
        """A commit came."""
        now = Moved(round + 1, sum(self.of("sent").values()), sum(self.of("received").values()))
        if (began := self._began) is not None and began.round == round:
            self.last_round = Moved(round, now.sent - began.sent, now.received - began.received)
        self._began = now

    def counting(self, direction: str, path: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A message's serializer or parser that counts its bytes too."""
        key = direction, kind_of(path)

        def counted(message: Any) -> Any:
            made = convert(message)
            self.bytes[key] += len(made if direction == "sent" else message)
            return made

        return counted


class CountedChannel:
    """A channel whose calls are counted, for stubs."""

    def __init__(self, channel: grpc.aio.Channel, traffic: Traffic) -> None:
        self._channel, self._traffic = channel, traffic
        self._calls: WeakSet[grpc.aio.Call] = WeakSet()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Return whether a call is in progress."""
        return any(not call.done() for call in self._calls)

    def close(self) -> Coroutine[Any, Any, None]:
        """Cancel calls in progress once the result is awaited; new ones raise RemoteError from now on."""
        self._closed = True
        return self._channel.close()

    def __getattr__(self, arity: str) -> Callable[..., Any]:
        """unary_unary, unary_stream, …: what a stub asks of a channel."""
        make = getattr(self._channel, arity)

        def made(path: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
            write = self._traffic.counting("sent", path, request_serializer)
            begin = make(path, write, self._traffic.counting("received", path, response_deserializer), **options)

            def call(*arguments: Any, **details: Any) -> grpc.aio.Call:
                if self._closed:
                    raise RemoteError(
                        pb.REASON_UNAVAILABLE, "the connection was closed, because the limit of connections was reached"
                    )
                begun: grpc.aio.Call = begin(*arguments, **details)
                self._calls.add(begun)
                return begun

            return call

        return made
