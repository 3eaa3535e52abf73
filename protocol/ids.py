"""Identifiers: peer ids, run ids and the join link; and readable forms of them and of numbers.

A peer id is libp2p's: base58btc of the identity multihash of the protobuf-wrapped Ed25519 key, hence `12D3Koo…`.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.limits import COORDINATORS

__all__ = [
    "PEERS_NAMED",
    "JoinLink",
    "Way",
    "is_meant",
    "key_of_peer",
    "parse_account",
    "peer_id",
    "printable",
    "several",
    "short",
    "shortly",
]

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PREFIX = b"\x00\x24\x08\x01\x12\x20"  # identity multihash, 36 bytes: PublicKey{Type=Ed25519, Data=32 bytes}

NAMES_KEPT = 4096
"""Names remembered in either form, four for each cluster of the largest roster: base 58 costs more than a hash."""


@lru_cache(NAMES_KEPT)
def peer_id(key: bytes) -> str:
    """The peer id of a raw 32-byte Ed25519 public key."""
    raw = _PREFIX + key
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


@lru_cache(NAMES_KEPT)
def key_of_peer(peer: str) -> bytes:
    """The raw public key inside a peer id. Raises ValueError when it is not the id of an Ed25519 key."""
    number = 0
    if len(peer) > 64:
        raise ValueError("too long for a peer id")
    for character in peer:
        if (digit := _ALPHABET.find(character)) < 0:
            raise ValueError("not the peer id of an Ed25519 key")
        number = number * 58 + digit
    raw = number.to_bytes(len(_PREFIX) + 32, "big") if number.bit_length() <= 8 * 38 else b""
    if not raw.startswith(_PREFIX) or peer_id(raw[len(_PREFIX) :]) != peer:
        raise ValueError("not the peer id of an Ed25519 key")
    return raw[len(_PREFIX) :]


def printable(text: str) -> str:
    """Return text of an unknown peer without control characters, for a terminal or a log."""
    return "".join(c if c.isprintable() else "?" for c in text)


def several(count: int, one: str, more: str = "") -> str:
    """Return a number with its noun: "1 worker", "8 workers". `more`: a plural that is not `one` with an s."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def short(peer: str) -> str:
    """`12D3…k7Qm`, for tables."""
    return f"{peer[:4]}…{peer[-4:]}" if len(peer) > 12 else peer


def is_meant(peer: str, said: str) -> bool:
    """Return whether the text names the peer: its id, a beginning of it, or a short form with … or ... in the middle."""
    begin, dots, end = said.replace("...", "…").partition("…")
    return peer.startswith(begin) and peer.endswith(end) if dots else peer.startswith(said)


def host_port(host: str, port: int) -> str:
    """Join a host and a port as gRPC and URLs expect them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


PEERS_NAMED = 3
"""That a line names before it counts the rest."""


def shortly(peers: Sequence[str]) -> str:
    """`12D3…k7Qm, 12D3…pX1a, 12D3…bB3c and 4 more`, for a line."""
    more = f" and {len(peers) - PEERS_NAMED} more" if len(peers) > PEERS_NAMED else ""
    return ", ".join(short(peer) for peer in peers[:PEERS_NAMED]) + more


class Way(NamedTuple):
    """Address of a peer."""

    at: str
    """host:port of a gRPC server."""
    certificate: bytes
    """SHA-256 of the DER certificate that this server presents."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of `at`."""
        host, _, port = self.at.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @classmethod
    def parse(cls, at: str, digest: str) -> "Way":
        """Parse an address of a link. Raises ValueError."""
        if re.fullmatch(r"[0-9A-Za-z_-]{43}", digest) is None:
            raise ValueError("cert= is not a SHA-256 digest in base64url")
        host, _, port = at.rpartition(":")
        if host in ("", "[]") or re.fullmatch(r"[0-9]{1,5}", port) is None or not 0 < int(port) < 1 << 16:
            raise ValueError("at= is not HOST:PORT")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError("at= has an IPv6 address without brackets: use [ADDRESS]:PORT")
        return cls(at, urlsafe_b64decode(digest + "="))


def is_local(host: str) -> bool:
    """Return whether a host name or address means the machine that uses it, wherever that is."""
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host.rstrip(".").lower() in ("localhost", "ip6-localhost") or host.lower().endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


@dataclass(frozen=True)
class JoinLink:
    """Join link: `dilocox://RUN_ID@COORDINATOR?at=HOST:PORT&cert=DIGEST&dht=MULTIADDR&dht=…`. `at` and `cert` occur once
    for each of several coordinators."""

    run_id: bytes
    coordinator: str
    """Its peer id: it signs everything with that key."""
    at: str
    """host:port of its gRPC server when the link was made."""
    certificate: bytes
    """SHA-256 of the server's DER certificate: a digest makes the link short."""
    dht_addresses: tuple[str, ...] = ()
    """DHT addresses to find it if it has moved."""
    others: tuple[Way, ...] = ()
    """Addresses of standbys with its key."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """Return the addresses of the coordinator, leader and standbys."""
        return (Way(self.at, self.certificate), *self.others)

    @property
    def is_local(self) -> bool:
        """Return whether only the coordinator's machine can use the link."""
        return all(is_local(way.endpoint[0]) for way in self.ways)

    def __str__(self) -> str:
        query = []
        for at, certificate in self.ways:
            digest = urlsafe_b64encode(certificate).decode().rstrip("=")
            query += [f"at={quote(at, safe=':[]')}", f"cert={digest}"]
        query += ["dht=" + quote(address, safe="/") for address in self.dht_addresses]
        return f"dilocox://{self.run_id.hex()}@{self.coordinator}?{'&'.join(query)}"

    @classmethod
    def parse(cls, text: str) -> "JoinLink":
        """Raises ConfigError with what is wrong with the link."""
        try:
            scheme, _, rest = text.strip().partition("://")
            if scheme != "dilocox":
                raise ValueError("it does not begin with dilocox://")
            run, _, rest = rest.partition("@")  # by hand: URL parsers lower-case host names
            coordinator, _, query = rest.partition("?")
            if re.fullmatch(r"[0-9a-fA-F]{64}", run) is None:
                raise ValueError("the run id is not 64 hexadecimal digits")
            key_of_peer(coordinator)
            values = parse_qs(urlsplit("?" + query).query)
            places, digests, dht = values.get("at", [""]), values.get("cert", [""]), tuple(values.get("dht", ()))
            if len(places) != len(digests) or len(places) > COORDINATORS:
                raise ValueError(f"use one cert= for each at=, and at most {COORDINATORS}")
            first, *others = map(Way.parse, places, digests)
            link = cls(bytes.fromhex(run), coordinator, *first, dht, tuple(others))
            if not all(map(str.isprintable, (*places, *link.dht_addresses))):
                raise ValueError("an address contains characters that are not allowed")
            return link
        except ValueError as error:
            raise ConfigError(f"not a join link: {error}. Copy the line that `dilocox coordinator` prints.") from error


def parse_account(text: str) -> bytes:
    """Return the 20 bytes of an EVM account. Raises ConfigError, also for the account of all zeros, which has no owner."""
    if not re.fullmatch(r"0x[0-9a-fA-F]{40}", text) or not int(text, 16):
        raise ConfigError(f"{text!r} is not an account: use 0x and 40 hexadecimal digits, as a wallet shows it")
    return bytes.fromhex(text[2:])
