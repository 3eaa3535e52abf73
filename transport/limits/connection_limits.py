"""Limits of the connections to one server: connections per address, bytes and calls per connection.

The server's sockets belong to gRPC's own threads, which bound none of this. So the limits are applied from outside. The
kernel counts received bytes of each connection, and calls account for them. A connection beyond its limits is shut
down.
"""

import asyncio
import ctypes
import gc
import heapq
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dilocox.protocol import limits
from dilocox.transport.limits.addresses import Endpoint, network_of
from dilocox.transport.limits.server_sockets import NOTHING, Received, ServerSockets
from dilocox.transport.limits.token_bucket import TokenBucket

__all__ = ["ConnectionLimits", "ConnectionTable"]

IDLE_SECONDS, LOOK_SECONDS, SOON_SECONDS = 0.1, 0.025, 0.005
"""Pause between two checks of the sockets: without a connection of an unknown peer, with one, and while such connections
contain more than `SOON_BYTES`. At 1 Gbit/s the last is 0.6 MiB."""
LOOK_SHARE, SOON_SHARE = 0.05, 0.25
"""Most of a core for the checks, the last while connections contain more than `SOON_BYTES`; beyond it the pauses grow."""
LONGEST_SECONDS = 0.2
"""Longest pause: in a longer one a single address could fill the server with connections."""
QUIET_BYTES = 4 << 10
"""Bytes that nothing accounts for on a connection that stays where its network sent too much: a TLS handshake."""
SOON_BYTES = 256 << 10
"""Bytes on connections of unknown peers that nothing accounts for, above which the next look is soon."""
TRIM_BYTES = 4 << 20
TRIM_CONNECTIONS = 16
"""Freed memory returns to the system once so much was received on connections that closed, or once so many closed."""
TRIM_SECONDS = 2.0
"""Delay from the first close to the trim, which then covers all later closes."""


@dataclass
class _Connection:
    network: str
    """Network of its remote address."""
    number: int
    """Counts connections: a larger number is a newer one."""
    opened_at: float
    looked_at: float
    calls: TokenBucket
    called_at: float | None = None
    """Time of its newest call that ran."""
    running: int = 0
    """Calls in progress, and calls whose reply is not sent yet."""
    replies: int = 0
    """Bytes of replies to them that are not sent yet."""
    refused: int = 0
    """Calls refused, less those that were not."""
    peer: str = ""
    """Id of the known peer that made the newest call; empty: an unknown one did."""
    accounted: int = 0
    """Bytes since the last look that calls account for."""
    unaccounted: int = 0
    """Bytes that nothing accounts for; negative: so many more may come."""
    counted: Received = NOTHING
    """Received bytes at the last check."""
    seen: bool = False
    """True once the kernel listed it."""

    @property
    def weight(self) -> int:
        """Return the bytes of calls in progress, and of unsent replies."""
        return self.running * limits.CALL_HEADER_BYTES + self.replies

    @property
    def excess(self) -> int:
        """Bytes that nothing accounts for."""
        return max(0, self.unaccounted)


@dataclass
class ConnectionTable:
    """Decides which calls run and which connections are shut down. Does no I/O."""

    clock: Callable[[], float] = time.monotonic
    per_address: int = limits.CONNECTIONS_PER_ADDRESS
    """Most connections of unknown peers in one network, and most connections of one known peer."""
    fresh: int = limits.FRESH_CONNECTIONS
    """Connections of a network that begin at once with a full budget of calls."""
    fresh_per_second: float = limits.FRESH_CONNECTIONS_PER_SECOND
    _connections: dict[Endpoint, _Connection] = field(default_factory=dict)
    _networks: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)
    """Connections that may still begin with a full budget of calls, by network."""
    _peers: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)
    """Calls that a known peer may still make."""
    _count: int = 0

    def admit(self, endpoint: Endpoint, known_peer: str) -> float | None:
        """Return the seconds that a call waits before it runs; None: it is refused. `known_peer`: the caller's verified id where
        the run knows it, else empty."""
        now = self.clock()
        connection = self._connection(endpoint, now)
        connection.peer = known_peer
        budget = self._peer_budget(known_peer, now) if known_peer else connection.calls
        if (seconds := budget.borrow(now, limits.CALLS_WAITING)) is None:
            connection.refused += 1
            return None
        connection.refused = max(0, connection.refused - 1)
        connection.accounted += limits.CALL_HEADER_BYTES
        connection.called_at = now
        return seconds

    def run(self, endpoint: Endpoint, calls: int, reply: int = 0) -> None:
        """Count calls in progress on a connection (-1: one ended) and bytes of a reply."""
        if (connection := self._connections.get(endpoint)) is not None:
            connection.running = max(0, connection.running + calls)
            connection.replies = max(0, connection.replies + reply)

    def holds(self, endpoint: Endpoint) -> int:
        """Return the bytes that calls of a connection take, and replies that are not sent yet."""
        connection = self._connections.get(endpoint)
        return connection.weight if connection is not None else 0

    def account(self, endpoint: Endpoint, size: int) -> None:
        """Account for a request's bytes, which a handler has now."""
        if (connection := self._connections.get(endpoint)) is not None:
            connection.accounted += size + size // 8  # frames and TLS records add less than an eighth

    def trust(self, endpoint: Endpoint, known_peer: str) -> None:
        """Take a connection for a known peer's, whose first call here was just verified."""
        if (connection := self._connections.get(endpoint)) is not None:
            connection.peer = known_peer

    def is_excessive(self, endpoint: Endpoint) -> bool:
        """Return whether a connection continues to call although its calls are rejected."""
        connection = self._connections.get(endpoint)
        return connection is not None and connection.refused > limits.CALLS_REFUSED

    def observe(self, sockets: Mapping[Endpoint, Received]) -> list[Endpoint]:
        """Update from what the kernel counted, and return the connections to shut down."""
        now = self.clock()
        for endpoint, counted in sockets.items():
            connection = self._connection(endpoint, now)
            granted = int((now - connection.looked_at) * limits.UNACCOUNTED_BYTES_PER_SECOND)
            granted += (counted.acknowledged - connection.counted.acknowledged) // 8 + connection.accounted
            level = connection.unaccounted + counted.received - connection.counted.received - granted
            connection.unaccounted = max(level, -limits.UNACCOUNTED_BYTES_AHEAD)
            connection.seen, connection.looked_at, connection.counted, connection.accounted = True, now, counted, 0
        for endpoint in [e for e, c in self._connections.items() if e not in sockets and (c.seen or now - c.opened_at > 1.0)]:
            del self._connections[endpoint]
        # A call of a connection that was reset may come late, and makes an entry again. Only open connections count.
        return self._beyond({endpoint: self._connections[endpoint] for endpoint in sockets})

    def pause(self, took: float) -> float:
        """Return the seconds until the next look, where the last took so many."""
        excess = [connection.excess for connection in self._connections.values() if not connection.peer]
        if sum(excess) > SOON_BYTES:
            return min(LONGEST_SECONDS, max(SOON_SECONDS, took / SOON_SHARE))
        return min(LONGEST_SECONDS, max(LOOK_SECONDS if excess else IDLE_SECONDS, took / LOOK_SHARE))

    def _beyond(self, here: Mapping[Endpoint, _Connection]) -> list[Endpoint]:
        found = {
            endpoint
            for endpoint, each in here.items()
            if each.refused > limits.CALLS_REFUSED or each.unaccounted > _most_unaccounted(each)
        }
        found |= self._crowded({endpoint: each for endpoint, each in here.items() if endpoint not in found})
        found |= self._heavy({endpoint: each for endpoint, each in here.items() if endpoint not in found and not each.peer})
        return sorted(found)

    def _crowded(self, connections: Mapping[Endpoint, _Connection]) -> set[Endpoint]:
        """Return the connections that are too many for their network or known peer, or for this daemon."""
        groups: defaultdict[tuple[bool, str], list[Endpoint]] = defaultdict(list)
        for endpoint, each in connections.items():
            groups[not each.peer, each.peer or each.network].append(endpoint)
        unknown = sum(len(group) for (is_unknown, _), group in groups.items() if is_unknown)
        if unknown <= limits.CONNECTIONS_OF_UNKNOWN and all(len(group) <= self.per_address for group in groups.values()):
            return set()
        found: set[Endpoint] = set()
        left: list[tuple[tuple[int, bool, int], list[Endpoint]]] = []
        for (is_unknown, _), group in groups.items():
            ranked = self._ranked(group)
            found.update(ranked[self.per_address :])
            del ranked[self.per_address :]
            if is_unknown and ranked:
                left.append((self._turn(ranked), ranked))
        heapq.heapify(left)
        for _ in range(sum(len(group) for _, group in left) - limits.CONNECTIONS_OF_UNKNOWN):
            _, group = heapq.heappop(left)
            found.add(group.pop())
            if group:
                heapq.heappush(left, (self._turn(group), group))
        return found

    def _turn(self, ranked: list[Endpoint]) -> tuple[int, bool, int]:
        """Order networks for eviction when the server is full: the network with the most connections loses one first. Of
        equal ones, first those without calls, the oldest first; then those with calls, the newest first. So idle
        connections exclude no newcomer."""
        last = self._connections[ranked[-1]]
        calls = last.called_at is not None
        return -len(ranked), calls, -last.number if calls else last.number

    def _ranked(self, group: list[Endpoint]) -> list[Endpoint]:
        """Order connections by their right to stay. Half of the places are for the oldest that call: a flood of new connections
        ends none of them. The other half are for the newest that have not called yet, then for those that called last: idle ones
        keep no newcomer out."""
        half = self.per_address // 2
        group = sorted(group, key=lambda endpoint: self._connections[endpoint].number)
        calling = [endpoint for endpoint in group if self._connections[endpoint].called_at is not None]
        silent = [endpoint for endpoint in reversed(group) if self._connections[endpoint].called_at is None]
        newer = sorted(calling[half:], key=lambda endpoint: self._connections[endpoint].called_at or 0.0, reverse=True)
        return [*calling[:half], *silent[:half], *newer, *silent[half:]]

    def _heavy(self, unknown: Mapping[Endpoint, _Connection]) -> set[Endpoint]:
        """Return the connections of networks beyond their limits, and the heaviest if all networks together are."""
        if sum(each.excess + each.weight for each in unknown.values()) <= limits.UNACCOUNTED_BYTES_OF_SILENT:
            return set()
        networks: defaultdict[str, list[Endpoint]] = defaultdict(list)
        for endpoint, each in unknown.items():
            networks[each.network].append(endpoint)
        found: set[Endpoint] = set()
        for group in networks.values():
            silent = [endpoint for endpoint in group if not unknown[endpoint].running]
            for part, most in (
                (silent, limits.UNACCOUNTED_BYTES_OF_SILENT),
                (group, limits.UNACCOUNTED_BYTES_OF_NETWORK),
            ):
                # All of them: gRPC processes what it has read, and the rest would send more during that time.
                if sum(unknown[endpoint].excess for endpoint in part) > most:
                    found.update(endpoint for endpoint in part if unknown[endpoint].excess > QUIET_BYTES)
            kept = sorted((e for e in group if e not in found), key=lambda endpoint: unknown[endpoint].weight)
            weight = sum(unknown[endpoint].weight for endpoint in kept)
            while weight > limits.UNACCOUNTED_BYTES_OF_NETWORK:
                found.add(heaviest := kept.pop())
                weight -= unknown[heaviest].weight
        return found | self._heaviest({endpoint: each for endpoint, each in unknown.items() if endpoint not in found})

    def _heaviest(self, unknown: Mapping[Endpoint, _Connection]) -> set[Endpoint]:
        """Return the heaviest connections of the heaviest networks, until the rest is within the limit of all unknown peers."""
        groups: defaultdict[str, list[Endpoint]] = defaultdict(list)
        sizes = {endpoint: each.excess + each.weight for endpoint, each in unknown.items()}
        for endpoint in sorted(sizes, key=lambda endpoint: sizes[endpoint]):
            groups[unknown[endpoint].network].append(endpoint)
        left = [(-sum(sizes[endpoint] for endpoint in group), group) for group in groups.values()]
        heapq.heapify(left)
        total, found = sum(sizes.values()), set[Endpoint]()
        while total > limits.UNACCOUNTED_BYTES_OF_UNKNOWN:
            size, group = left[0]
            found.add(heaviest := group.pop())
            total -= sizes[heaviest]
            heapq.heapreplace(left, (size + sizes[heaviest], group))
        return found

    def _connection(self, endpoint: Endpoint, now: float) -> _Connection:
        if (connection := self._connections.get(endpoint)) is None:
            self._count += 1
            network = network_of(endpoint.address)
            full = _bucket(self._networks, network, (self.fresh_per_second, self.fresh), now).take(now)
            calls = TokenBucket(limits.CALLS_PER_SECOND, limits.CALLS_BURST, now, None if full else 0.0)
            connection = self._connections[endpoint] = _Connection(network, self._count, now, now, calls)
        return connection

    def _peer_budget(self, peer: str, now: float) -> TokenBucket:
        return _bucket(self._peers, peer, (limits.CALLS_PER_SECOND_KNOWN, limits.CALLS_BURST_KNOWN), now)


def _most_unaccounted(connection: _Connection) -> int:
    if connection.peer:
        return limits.UNACCOUNTED_BYTES_KNOWN
    return limits.UNACCOUNTED_BYTES_OF_CALLS if connection.running else limits.UNACCOUNTED_BYTES


def _bucket(buckets: OrderedDict[str, TokenBucket], key: str, rate: tuple[float, float], now: float) -> TokenBucket:
    """Return the bucket of a key; of many, those used longest ago are forgotten."""
    bucket = buckets.setdefault(key, TokenBucket(*rate, now))
    buckets.move_to_end(key)
    if len(buckets) > limits.KNOWN_PEERS:
        buckets.popitem(last=False)
    return bucket


def trim_memory() -> None:
    """Collect garbage, and return freed memory to the system where the C library can. Blocking."""
    gc.collect(1)  # calls that ended with their connection lie in cycles, and are young
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ConnectionLimits:
    """The table of one server, and the loop that applies it to the server's sockets."""

    def __init__(self, is_known: Callable[[str], bool] = lambda peer: False, table: ConnectionTable | None = None) -> None:
        """`is_known`: whether a verified caller takes part in the run."""
        self.is_known = is_known
        self.table = table or ConnectionTable()
        self.shut_down = 0
        """Connections that were beyond their limits."""
        self._open: Mapping[Endpoint, Received] = {}
        self._closed, self._closed_bytes = 0, 0
        """Connections that closed since the last trim, and what was received on them."""
        self._trim = asyncio.Event()

    async def watch(self, port: int) -> None:
        """Apply the limits to a port's connections, until cancelled."""
        trim = asyncio.create_task(self._trim_after_closes(), name="trim")
        try:
            await self._look_for_ever(ServerSockets(port))
        finally:
            trim.cancel()

    async def _look_for_ever(self, sockets: ServerSockets) -> None:
        while True:
            began = time.monotonic()
            here = sockets.read()
            beyond = self.table.observe(here)
            if beyond:
                sockets.reset(beyond)
            self.shut_down += len(beyond)
            self._note_closed(here)
            await asyncio.sleep(self.table.pause(time.monotonic() - began))

    def _note_closed(self, here: Mapping[Endpoint, Received]) -> None:
        closed = self._open.keys() - here.keys()
        self._closed += len(closed)
        self._closed_bytes += sum(self._open[endpoint].received for endpoint in closed)
        self._open = here
        if self._closed >= TRIM_CONNECTIONS or self._closed_bytes >= TRIM_BYTES:
            self._trim.set()

    async def _trim_after_closes(self) -> None:
        while True:
            await self._trim.wait()
            await asyncio.sleep(TRIM_SECONDS)
            self._closed, self._closed_bytes = 0, 0
            self._trim.clear()
            await asyncio.to_thread(trim_memory)
