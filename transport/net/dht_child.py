"""DHT process: hivemind's P2P and DHTNode on a loop of their own. The only file that imports hivemind.

Not `hivemind.DHT`: that forks, leaves its libp2p daemon behind when its parent is killed, and cannot restart on the
same identity. This process exchanges JSON lines on stdin and stdout; it ends, with its libp2p daemon, when stdin does.
It is up as soon as it listens: it connects to the given peers in the background, and retries for ever.

    first line {"up": true}
    request    {"id": 1, "put": {"peer": PEER, "value": BASE64, "seconds": 300}}    {"id": 2, "find": PEER}    {"know": [PEER, …]}
    reply      {"id": 1, "ok": true}                                                {"id": 2, "record": BASE64 or null}

A DHT of other records than a run's peer records has its own module, which passes another class of records to `main`.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import select
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# isort: off
import dilocox.transport.process.torch_stub  # noqa: F401  before hivemind

# isort: on
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import open_envelope

__all__ = [
    "DHTID",
    "FIRST_PAUSE_SECONDS",
    "MEET_SECONDS",
    "P2P",
    "PLAIN",
    "DHTNode",
    "DHTRecord",
    "Here",
    "MSGPackSerializer",
    "PeerID",
    "PeerRecordValidator",
    "PeerRecords",
    "RecordValidatorBase",
    "get_dht_time",
    "key_of",
    "main",
    "process_of",
]

PLAIN = DHTProtocol.IS_REGULAR_VALUE
"""Subkey of what has none."""
MEET_SECONDS = 30.0
"""Wait for one peer: a connection and a ping across the world take about one second."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""Pause between two tries to connect to given peers."""
STOP_SECONDS = 3.0
SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket in Linux."""
SOCKET_NAME_BYTES = len("/p2pclient-0123456789a.sock")
"""Longest name that hivemind gives a socket, with its slash."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for sockets, if the folder for temporary files has a longer path or cannot be used."""


def key_of(run_id: bytes, peer: str) -> str:
    """Return the DHT key of a peer's record: each peer has its own key."""
    return f"dilocox/{run_id.hex()}/{peer}"


class PeerRecordValidator(RecordValidatorBase):
    """Stores nothing but this run's peer records, each under the key of who signed it, and not for long; of peers that the run does
    not know, a few."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self.known: frozenset[str] = frozenset()
        self._strangers: dict[str, float] = {}
        """Expiry of the record, by unknown peer."""

    def know(self, peers: Iterable[str]) -> None:
        """Store the records of these peers, however many others there are."""
        self.known = frozenset(peers)

    def validate(self, record: DHTRecord) -> bool:
        try:
            now = get_dht_time()
            if record.subkey != PLAIN or len(record.value) > limits.RECORD_BYTES:
                return False
            if record.expiration_time > now + limits.DHT_RECORD_SECONDS:
                return False
            value = MSGPackSerializer.loads(record.value)
            peer = open_envelope(bytes(value), self._run_id, (pb.KIND_PEER_RECORD,)).peer
            here = record.key == DHTID.generate(source=key_of(self._run_id, peer)).to_bytes()
            return here and (peer in self.known or self._has_room(peer, record.expiration_time, now))
        except (RemoteError, ValueError, TypeError):
            return False
        except Exception:  # msgpack raises its own family on foreign bytes; such a record is never ours
            return False

    def _has_room(self, peer: str, expires: float, now: float) -> bool:
        """Return whether a record may be stored, first come first served until it expires. Unknown peers displace only
        each other."""
        if peer not in self._strangers and len(self._strangers) >= limits.DHT_STRANGERS:
            self._strangers = {other: end for other, end in self._strangers.items() if end > now}
            if len(self._strangers) >= limits.DHT_STRANGERS:
                return False
        self._strangers[peer] = max(expires, self._strangers.get(peer, 0.0))
        return True


@dataclass(frozen=True)
class Here:
    """Our node, and those that it met."""

    p2p: P2P
    node: DHTNode
    begins: bool
    """True if it received no peers: others begin with it."""

    @property
    def others(self) -> list[PeerID]:
        """Return the peers that we met."""
        return list(self.node.protocol.routing_table.peer_id_to_uid)

    def is_kept(self, stored: bool) -> bool:
        """Return whether another node finds what was stored: a value that this node alone has is found by none."""
        return stored and (self.begins or bool(self.others))


class Records(Protocol):
    """Values that a DHT stores, and the requests that it answers."""

    validator: RecordValidatorBase

    async def serve(self, p2p: P2P, identity: Identity) -> None:
        """Begin what other nodes may ask of one that stores records."""

    def know(self, peers: list[str]) -> None:
        """Note the peers whose records are stored however many others come."""

    async def answer(self, here: Here, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request."""
        ...


class PeerRecords:
    """The peer records of a run."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self.validator = PeerRecordValidator(run_id)

    async def serve(self, p2p: P2P, identity: Identity) -> None:
        """Nothing but records is asked for."""

    def know(self, peers: list[str]) -> None:
        self.validator.know(peers)

    async def answer(self, here: Here, request: dict[str, Any]) -> dict[str, Any]:
        if put := request.get("put"):
            expiration = get_dht_time() + put["seconds"]
            value = base64.b64decode(put["value"])
            stored = await here.node.store(key_of(self._run_id, put["peer"]), value, expiration)
            return {"ok": here.is_kept(bool(stored))}
        found = await here.node.get(key_of(self._run_id, request["find"]), latest=True)
        is_one = found is not None and isinstance(found.value, bytes)
        return {"record": base64.b64encode(found.value).decode() if is_one else None}


def socket_folder(home: Path, run_id: bytes) -> Path:
    """Make the folder of libp2p's sockets for the child of this home and run, without what a killed process left in it.

    Raises LocalError where no folder for temporary files can be used.
    """
    place = hashlib.sha256(os.fsencode(home.absolute()) + b"\0" + run_id).hexdigest()[:12]
    name = f"dilocox-{os.getuid()}-{place}"
    roots = list(dict.fromkeys([tempfile.gettempdir(), *SHORT_FOLDERS]))
    for root in roots:
        folder = Path(root) / name
        if len(os.fsencode(folder)) > SOCKET_PATH_BYTES - SOCKET_NAME_BYTES:
            continue
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue  # another user took this name
            for left in folder.glob("p2p*.sock"):
                left.unlink(missing_ok=True)
        except OSError:
            continue
        return folder
    raise LocalError(f"cannot make a folder for sockets in {', '.join(roots)}: set TMPDIR to a folder with a short path")


async def run(settings: dict[str, Any], make: Callable[[bytes], Records]) -> None:
    """Serve until stdin ends. `make`: returns the records of a run id."""
    run_id = bytes.fromhex(settings["run_id"])
    sockets = await asyncio.to_thread(socket_folder, Path(settings["identity"]).parent, run_id)

    class OwnP2P(P2P):
        # hivemind's socket would be in /tmp, where those of killed daemons stay for ever
        _UNIX_SOCKET_PREFIX = f"/unix{sockets}/"

    p2p = await OwnP2P.create(
        host_maddrs=[settings["listen"]],  # one address: one listener, no UDP
        identity_path=settings["identity"],
        check_if_identity_free=False,
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        startup_timeout=None,  # a slow machine is not a dead one: its end is noticed
    )
    try:
        identity = Identity.from_libp2p(Path(settings["identity"]).read_bytes())
        working = asyncio.create_task(_work(p2p, identity, make(run_id), settings["bootstrap"], settings["keeps"]))
        libp2p = asyncio.create_task(process_of(p2p).wait())  # its end leaves hivemind waiting for an answer, perhaps for ever
        await asyncio.wait({working, libp2p}, return_when=asyncio.FIRST_COMPLETED)
        if libp2p.done():
            raise RuntimeError("libp2p's process ended")
        working.result()
    finally:
        async with asyncio.timeout(STOP_SECONDS):
            await p2p.shutdown()
        with contextlib.suppress(OSError):
            sockets.rmdir()


def process_of(p2p: P2P) -> asyncio.subprocess.Process:
    """Return libp2p's process; hivemind has no public accessor."""
    process: asyncio.subprocess.Process = p2p._child
    return process


async def _work(p2p: P2P, identity: Identity, records: Records, bootstrap: list[str], keeps: bool) -> None:
    """Say that we listen, meet the others, answer requests until stdin ends, leave."""
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=str(p2p.peer_id)),  # a restart is the same node to the others
        record_validator=records.validator,
        cache_size=limits.DHT_STRANGERS,
        client_mode=not keeps,
    )
    if keeps:
        await records.serve(p2p, identity)
    print(json.dumps({"up": True}), flush=True)
    meeting = asyncio.create_task(_meet_forever(p2p, node, bootstrap))
    await _serve(Here(p2p, node, not bootstrap), records)
    meeting.cancel()
    await node.shutdown()


async def _meet_forever(p2p: P2P, node: DHTNode, bootstrap: list[str]) -> None:
    """Add every given peer to the routing table, whenever it comes up."""
    wanted: dict[PeerID, Multiaddr] = {}
    for text in bootstrap:
        with contextlib.suppress(Exception):  # records of other peers name them: an invalid address is no peer
            place, _, peer = text.rpartition("/p2p/")  # apart: libp2p does not read hivemind's encoding of both together
            wanted[PeerID.from_base58(peer)] = Multiaddr(place)
    wanted.pop(p2p.peer_id, None)
    pause = FIRST_PAUSE_SECONDS
    while True:
        missing = [peer for peer in wanted if node.protocol.routing_table.get(peer_id=peer) is None]
        met = await asyncio.gather(*(_meet(p2p, node, peer, wanted[peer]) for peer in missing))
        if any(met):
            await node.find_nearest_nodes([node.node_id])
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)


async def _meet(p2p: P2P, node: DHTNode, peer: PeerID, address: Multiaddr) -> bool:
    """Whether the peer answered."""
    try:
        async with asyncio.timeout(MEET_SECONDS):
            await p2p._client.connect(peer, [address])
            return await node.protocol.call_ping(peer) is not None
    except Exception:  # hivemind raises its own family for libp2p's answers; in any case there is another try
        return False


async def _serve(here: Here, records: Records) -> None:
    reader = asyncio.StreamReader(limit=4 * limits.MIB)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pending: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        request = json.loads(line)
        if (known := request.get("know")) is not None:
            records.know(known)
            continue
        task = asyncio.create_task(_answer(here, records, request))
        pending.add(task)
        task.add_done_callback(pending.discard)


async def _answer(here: Here, records: Records, request: dict[str, Any]) -> None:
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        reply |= await records.answer(here, request)
    except Exception as error:
        reply["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(reply), flush=True)


def _end_with_daemon() -> None:
    """Exit when stdin closes: the daemon alone has its other end. This also works while libp2p starts."""
    hangup = select.poll()
    hangup.register(sys.stdin, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def main(make: Callable[[bytes], Records] = PeerRecords) -> None:
    """Run the child. argv[1]: JSON settings. `make`: returns the records of a run id.

    It leads its own process group, so that the daemon can end libp2p's process with it.
    """
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_daemon, name="parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    try:
        asyncio.run(run(settings, make))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    finally:
        os.killpg(0, signal.SIGKILL)  # libp2p's process, and this one


if __name__ == "__main__":
    main()
