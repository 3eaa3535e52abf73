"""The DHT as the daemon sees it: publish my signed record, find another's. The work happens in a child process (dht_child.py)."""

import asyncio
import base64
import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.process.processes import end_process, start_process
from dilocox.transport.store.files import write_atomically

__all__ = ["Dht", "DhtSettings"]

log = logging.getLogger(__name__)

REQUEST_SECONDS = 20.0
RECORD_SECONDS = 300
"""Life of a record after its last publication; the record of an absent peer expires."""
FIRST_RESTART_SECONDS, LONGEST_RESTART_SECONDS = 1.0, 30.0
"""Pause between the end of a child and the next start; it doubles while none comes up."""


@dataclass(frozen=True)
class DhtSettings:
    run_id: bytes
    identity: Identity
    folder: Path
    """Folder of the libp2p form of the identity, mode 0600."""
    listen: str
    """Multiaddr, with the published port."""
    bootstrap: Sequence[str]
    """Peers to begin with; none has to answer."""
    keeps: bool = True
    """True for a peer that stores records for others; otherwise it only asks, and no peer learns its address."""
    module: str = "dilocox.transport.net.dht_child"
    """Module of the child."""


class Dht:
    """One running DHT child; a child that dies is started again with the addresses seen so far.

    No other task waits for it: without a child, `publish` and `find` raise LocalError.
    """

    def __init__(self, settings: DhtSettings) -> None:
        self._settings = settings
        self._bootstrap = list(settings.bootstrap)
        self._process: asyncio.subprocess.Process | None = None
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._up = False
        """The child listens and takes requests."""
        self._known: list[str] = []

    async def run(self) -> None:
        """Supervise the child until cancelled."""
        pause = FIRST_RESTART_SECONDS
        while True:
            try:
                came_up = await self._run_once()
            except (OSError, ValueError) as error:  # no process, no memory, no disk; its text is not for our log
                log.warning("cannot use the DHT process: %s", error)
                came_up = False
            pause = FIRST_RESTART_SECONDS if came_up else min(LONGEST_RESTART_SECONDS, 2 * pause)
            log.warning("the DHT process ended; restarting it in %.0f s", pause)
            await asyncio.sleep(pause)

    async def _run_once(self) -> bool:
        """Run one child. Return whether it came up."""
        identity = self._settings.folder / "libp2p.key"
        write_atomically(identity, self._settings.identity.libp2p_private_key(), mode=0o600)
        settings = {
            "run_id": self._settings.run_id.hex(),
            "identity": str(identity),
            "listen": self._settings.listen,
            "bootstrap": self._bootstrap,
            "keeps": self._settings.keeps,
        }
        process = await start_process(
            sys.executable,
            "-P",
            "-m",
            self._settings.module,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        self._process = process
        try:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                self._receive(json.loads(line))
            return self._up
        finally:
            self._process, self._up = None, False
            for future in self._requests.values():
                if not future.done():
                    future.set_exception(LocalError("the DHT process ended"))
            self._requests.clear()
            await end_process(process)  # and libp2p's, which it started

    def _receive(self, message: dict[str, Any]) -> None:
        if "up" in message:
            self._up = True
            self._tell_known()
        elif "id" not in message:
            log.error("DHT: %s", message.get("error"))
        elif (future := self._requests.pop(message["id"], None)) and not future.done():
            future.set_result(message)

    def know(self, peers: Iterable[str]) -> None:
        """Replace the peers whose records are stored for others, however many unknown peers write."""
        known = sorted(peers)
        if known != self._known:
            self._known = known
            self._tell_known()

    def _tell_known(self) -> None:
        if self._up and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"know": self._known}).encode() + b"\n")

    def remember(self, addresses: Sequence[str]) -> None:
        """More places to bootstrap from, should the child start again."""
        self._bootstrap = list(dict.fromkeys([*self._bootstrap, *addresses]))[-64:]

    async def ask(self, message: dict[str, Any], patience: float = REQUEST_SECONDS) -> dict[str, Any]:
        """The child's reply, within so many seconds. Raises LocalError."""
        process = self._process
        if process is None or process.stdin is None or not self._up:
            raise LocalError("the DHT process is not running yet")
        self._next_id += 1
        number, future = self._next_id, asyncio.get_running_loop().create_future()
        self._requests[number] = future
        process.stdin.write(json.dumps({"id": number, **message}).encode() + b"\n")
        try:
            async with asyncio.timeout(patience):
                reply: dict[str, Any] = await future
        except TimeoutError as error:
            raise LocalError("the DHT process does not answer") from error
        finally:
            self._requests.pop(number, None)
        if "error" in reply:
            raise LocalError(f"DHT: {reply['error']}")
        return reply

    async def publish(self, record: Statement) -> bool:
        """Store this peer's record; return False if no other node could store it."""
        value = base64.b64encode(record.envelope.SerializeToString()).decode()
        put = {"peer": record.peer, "value": value, "seconds": RECORD_SECONDS}
        return bool((await self.ask({"put": put}))["ok"])

    async def find(self, peer: str) -> Statement | None:
        """The peer's record, where one that verifies is found."""
        value = (await self.ask({"find": peer}))["record"]
        if value is None:
            return None
        with contextlib.suppress(RemoteError):
            record = open_envelope(base64.b64decode(value), self._settings.run_id, (pb.KIND_PEER_RECORD,))
            if record.peer == peer:
                return record
        return None
