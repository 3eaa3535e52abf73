"""API socket of a daemon, from its first moment to its last.

Before the API is ready, a short status answers: starting, waiting for the coordinator, or waiting for disk space. One
socket stays open all the time, so no request is refused in between.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry

from dilocox.protocol import limits
from dilocox.protocol.errors import PortError
from dilocox.transport.limits.connection_limits import ConnectionLimits, ConnectionTable
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.views.health import answers_of_standby, answers_of_waiting
from dilocox.views.http import Problem, create_app, own_address, within_limits
from dilocox.views.page import page

__all__ = ["ApiListener", "open_listener"]

log = logging.getLogger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record is not of a malformed request, which any caller could fill the log with."""
    error = record.exc_info[1] if record.exc_info else None
    while error is not None:
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            return False
        error = error.__cause__
    return True


server_log = logging.getLogger("dilocox.api")
server_log.addFilter(_is_ours)

BACKLOG = 128
"""Most connections that wait while one application replaces another."""
ROOM = "it continues by itself as soon as there is free space; everything that it announced is stored"


class ApiListener:
    def __init__(self, listen: str) -> None:
        """`listen`: host:port, port 0 for any. Raises PortError where that is taken, or not this machine's."""
        self._host = listen.rpartition(":")[0]
        self._sockets = _bind(listen)
        shown = "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host
        self.port: int = self._sockets[0].getsockname()[1]
        self.url = f"http://{shown}:{self.port}"
        table = ConnectionTable(
            per_address=limits.API_CONNECTIONS_PER_ADDRESS,
            fresh=limits.API_FRESH_CONNECTIONS,
            fresh_per_second=limits.API_FRESH_CONNECTIONS_PER_SECOND,
        )
        self.connections = ConnectionLimits(table=table)
        self.says = "it is starting"
        """Reason of the wait, until there is an API."""
        self.advice = ""
        self._room = True
        self._stands_by = False
        self._runner: web.AppRunner | None = None

    async def show(self, app: web.Application) -> None:
        """`app` answers from now on, who did so no longer. Raises OSError."""
        app.middlewares.append(within_limits(self.connections))
        app.middlewares.append(own_address(self._host))
        runner = web.AppRunner(app, access_log=None, logger=server_log, shutdown_timeout=1.0)
        await runner.setup()
        ours: list[socket.socket] = []
        try:
            for each in self._sockets:
                ours.append(each.dup())
                await web.SockSite(runner, ours[-1], backlog=BACKLOG).start()
        except OSError:
            await runner.cleanup()
            for each in ours:
                each.close()
            raise
        before, self._runner = self._runner, runner
        if before is not None:
            await before.cleanup()

    async def wait(self, says: str, advice: str = "") -> None:
        """Answer every request with what the daemon waits for. Raises OSError."""
        self.show_wait(says, advice)
        await self.show(self._waiting())

    def show_wait(self, says: str, advice: str = "", stands_by: bool = False) -> None:
        """It waits for something else now. `stands_by`: and does what it should."""
        self.says, self.advice, self._stands_by = says, advice, stands_by

    @asynccontextmanager
    async def no_room(self, says: str) -> AsyncIterator[None]:
        """Answer for a daemon without disk space, for `disk_pressure.while_there_is_room`."""
        self._room = False
        try:
            await self.wait(says, ROOM)
        except OSError as error:  # what there is too little of may be what an answer needs
            log.warning("the API cannot answer while this daemon waits: %s", error)
        yield
        self._room = True
        self.show_wait("it is restarting")

    async def close(self) -> None:
        for each in self._sockets:
            each.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _waiting(self) -> web.Application:
        async def status() -> dict[str, Any]:
            state = "standby" if self._stands_by else "starting" if self._room else "no-room"
            waiting = answers_of_waiting(self._room, self.says, self.advice)
            answers = answers_of_standby(self.says) if self._stands_by else waiting
            return {"role": "waiting", "state": state, "why": self.says, "advice": self.advice, "answers": answers}

        async def not_yet(request: web.Request) -> web.StreamResponse:
            raise Problem("waiting", f"this daemon has no answer yet: {self.says}")

        app = create_app(CollectorRegistry(), status)
        app.router.add_get("/", page())
        app.router.add_route("*", "/v1/{what:.*}", not_yet)
        return app


@asynccontextmanager
async def open_listener(listen: str, home: DataDirectory, run_id: bytes, name: str) -> AsyncIterator[ApiListener]:
    """Open the socket and write its address to the folder. It answers from the start. Raises LocalError."""
    door = ApiListener(listen)
    watching = asyncio.create_task(door.connections.watch(door.port), name="API connections")
    watching.add_done_callback(_log_failure)
    try:
        await door.wait("it is starting")
        kept = {key: port for key, port in home.remembered().items() if key in ("port", "dht_port")}
        try:
            home.announce(**kept, role="waiting", api=door.url, run_id=run_id.hex(), name=name)
        except OSError as error:  # it then waits for disk space
            log.warning("commands on this machine cannot find %s: %s", door.url, error)
        yield door
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await door.close()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the limits of the API's connections no longer apply", exc_info=error)


def _bind(listen: str) -> list[socket.socket]:
    """Bind every address of the host. Raises PortError."""
    host, _, port = listen.rpartition(":")
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            each = socket.socket(family, kind, protocol)
            bound.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            at = address[1] or bound[0].getsockname()[1]  # the port that the first of them got
            each.bind((address[0], at, *address[2:]))
            each.listen(BACKLOG)
    except OSError as error:
        for each in bound:
            with contextlib.suppress(OSError):
                each.close()
        what = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise PortError(f"cannot serve the API at {listen}: {what}. Use another port with --api HOST:PORT.") from error
    return bound
