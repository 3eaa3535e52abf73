"""What a daemon says while it waits for room: the same sentence to `dilocox status`, probes and log."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry

from dilocox.views.http import create_app, json_response, serve_http

__all__ = ["waiting_page"]

log = logging.getLogger(__name__)


def waiting_page(listen: str, remembered: Callable[[], dict[str, Any]]) -> Callable[[str], AbstractAsyncContextManager[None]]:
    """A page for `room.while_there_is_room`, where the daemon's API was: `remembered` says which port it had chosen."""

    def address() -> str:
        host, _, port = listen.rpartition(":")
        return listen if port != "0" else f"{host}:{urlsplit(remembered().get('api', '')).port or 0}"

    @asynccontextmanager
    async def page(why: str) -> AsyncIterator[None]:
        async def status(request: web.Request) -> web.Response:
            return json_response({"role": "waiting", "state": "waiting", "why": why})

        app = create_app(CollectorRegistry(), lambda: why)
        app.router.add_get("/v1/status", status)
        async with AsyncExitStack() as closing:
            try:
                runner, _ = await serve_http(app, address())
                closing.push_async_callback(runner.cleanup)
            except OSError as error:  # what there is too little of may be what a page needs
                log.warning("nobody can ask while this daemon waits: %s", error)
            yield

    return page
