"""The cluster link: what a box needs to join its lead, and how it shows that it has it."""

import fcntl
import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, quote

from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.ids import JoinLink
from dilocox.transport.store.files import read_checked, write_atomically

__all__ = ["CLUSTER_LINK", "ClusterLink", "address_on", "exposed", "load_or_create_secret", "proof"]

CLUSTER_LINK = "cluster.link"
"""File in a lead host's folder: any holder of it may join the cluster."""
SECRET_BYTES = 32
SCHEME = "dilocox-cluster"
SIOCGIFADDR = 0x8915
"""Source: netdevice(7)."""


@dataclass(frozen=True)
class ClusterLink:
    """Cluster link: `dilocox-cluster://SECRET?lead=LINK&join=LINK`. It admits to the cluster, so it travels as a file and
    is never printed."""

    secret: bytes
    lead: JoinLink
    """The lead's daemon, in the form of a join link: run, peer id, address, certificate."""
    join: JoinLink
    """Join link of the run."""

    def __str__(self) -> str:
        return f"{SCHEME}://{self.secret.hex()}?lead={quote(str(self.lead), safe='')}&join={quote(str(self.join), safe='')}"

    @classmethod
    def parse(cls, text: str) -> "ClusterLink":
        """Raises ConfigError with what is wrong with it."""
        scheme, _, rest = text.strip().partition("://")
        secret, _, query = rest.partition("?")
        values = {name: found[0] for name, found in parse_qs(query).items()}
        if scheme != SCHEME or not {"lead", "join"} <= values.keys():
            raise ConfigError("not a cluster link: use the file that `dilocox node --cluster-boxes` wrote on the lead host.")
        try:
            link = cls(bytes.fromhex(secret), JoinLink.parse(values["lead"]), JoinLink.parse(values["join"]))
        except ValueError as error:
            raise ConfigError("not a cluster link: its secret is not hexadecimal.") from error
        if len(link.secret) != SECRET_BYTES or link.lead.run_id != link.join.run_id:
            raise ConfigError("not a cluster link: its parts do not match each other.")
        return link


def load_or_create_secret(path: Path) -> bytes:
    """Return the secret of this lead host's cluster, the same across restarts. A damaged file is replaced, and the link
    changes. Blocking."""

    def parse(raw: bytes) -> bytes:
        if len(raw) != SECRET_BYTES:
            raise ValueError(f"{len(raw)} bytes")
        return raw

    kept = read_checked(path, parse)
    if kept is None:
        kept = secrets.token_bytes(SECRET_BYTES)
        write_atomically(path, kept, mode=0o600)
    return kept


def proof(secret: bytes, run_id: bytes, lead: str, box: str) -> bytes:
    """That this box knows the secret, good for this run and this lead alone."""
    return hmac.new(secret, b"\0".join((b"dilocox box", run_id, lead.encode(), box.encode())), hashlib.sha256).digest()


def address_on(interface: str) -> str:
    """Our IPv4 address on a network interface. Raises LocalError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise LocalError(f"--cluster-interface {interface}: {error.strerror}. This machine has {names}.") from error
    return socket.inet_ntoa(answer[20:24])


def exposed(interface: str, address: str) -> str:
    """A warning where what the boxes' workers listen on can be reached from anywhere; else empty."""
    if not ipaddress.ip_address(address).is_global:
        return ""
    return (
        f"--cluster-interface {interface} has the public address {address}: workers open ports there without "
        "authentication, and tensors are not encrypted. Use a LAN or WireGuard interface, or close these ports "
        "to other machines."
    )
