"""Remote addresses of connections, and the networks by which unknown peers are counted."""

import ipaddress
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

__all__ = ["Endpoint", "address_of", "endpoint_of", "endpoint_of_socket", "network_of"]

NETWORK_BITS = 64
"""Prefix length of an IPv6 network: a home gets a whole network of this size, so one caller has all of its addresses."""


class Endpoint(NamedTuple):
    """The remote end of a connection."""

    address: str
    """IPv4 or IPv6, without brackets or zone."""
    port: int


def endpoint_of(peer: str) -> Endpoint | None:
    """Parse what gRPC calls a peer, such as `ipv4:192.0.2.1:40000`; None where it is no TCP address."""
    family, _, rest = peer.partition(":")
    address, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Endpoint(_plain(unquote(address).strip("[]")), int(port))


def endpoint_of_socket(peer: Sequence[Any]) -> Endpoint:
    """Convert what the socket module calls a peer's name."""
    return Endpoint(_plain(str(peer[0])), int(peer[1]))


def _plain(address: str) -> str:
    """Normalise an address, whether gRPC or the socket module wrote it, and for either family of its socket."""
    bare = address.partition("%")[0]
    return bare.removeprefix("::ffff:") if "." in bare else bare


def network_of(address: str) -> str:
    """Return the network that one caller can have whole: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((parsed, NETWORK_BITS), strict=False))


def address_of(peer: str) -> str:
    """Return the network that a call comes from, by what gRPC calls its peer. Unknown peers are counted by it."""
    endpoint = endpoint_of(peer)
    return peer if endpoint is None else network_of(endpoint.address)
