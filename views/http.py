"""What the node's and the coordinator's HTTP APIs share: problem documents, JSON, health and metrics."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import SplitResult, urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, generate_latest

from dilocox.protocol import limits
from dilocox.protocol.errors import LocalError
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.event_log import EventLog
from dilocox.views import rows as views
from dilocox.views.answers import health
from dilocox.views.explain import explain
from dilocox.views.faults import FAULTS, do_about
from dilocox.views.openapi import describe
from dilocox.views.page import page

__all__ = ["Problem", "add_run_routes", "create_app", "json_response", "own_address", "wrong_address"]

View = views.View
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Problem(Exception):
    """An answer in application/problem+json. `code`: one of FAULTS that has a status."""

    def __init__(self, code: str, title: str) -> None:
        super().__init__(title)
        self.code = code

    def document(self, status: int | None = None) -> View:
        """`status`: where it is another than usual."""
        document = {"type": "about:blank", "title": str(self), "status": status or FAULTS[self.code].status, "code": self.code}
        return {**document, "do": do} if (do := do_about(self.code)) is not None else document


def json_response(value: Any) -> web.Response:
    return web.json_response(value, dumps=lambda v: json.dumps(v, allow_nan=False))


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        body = problem.document()
    except web.HTTPException as error:
        body = Problem("no-such-path", f"{request.method} {request.path[:100]}: {error.reason}").document(error.status)
    return web.json_response(body, status=body["status"], content_type="application/problem+json")


def own_address(named: str) -> Middleware:
    """Refuse what `wrong_address` says. Probes and metrics answer everybody."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1/"):
            wrong = wrong_address(request.host, request.headers.get("Origin"), named)
            if wrong is not None:
                raise wrong
        return await handler(request)

    return check


def wrong_address(host: str, origin: str | None, named: str) -> Problem | None:
    """What a web page could ask here under a name that it made point to us (DNS rebinding), or from another origin; None: nothing
    is wrong. A Host is an IP address, localhost, or `named`, which we listen on. Raises nothing, whatever the headers."""
    name = _split(host).hostname or ""
    if name not in ("localhost", named) and not _is_ip(name):
        return Problem("wrong-host", "ask by IP address, by localhost, or by the name in --api")
    if origin is not None and _split(origin, "").netloc != host:
        return Problem("wrong-origin", "another site's page may not ask this")
    return None


def _split(text: str, scheme: str = "//") -> SplitResult:
    """Nothing where it is not of a URL's form."""
    try:
        return urlsplit(scheme + text)
    except ValueError:
        return urlsplit("")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def create_app(
    registry: CollectorRegistry, status: Callable[[], Awaitable[View]], refresh: Callable[[], None] = lambda: None
) -> web.Application:
    """An app with /v1/status, /livez, /readyz, /metrics and /openapi.json. `status`: with the answers that `health` goes by.
    `refresh` is called, in a thread, before /metrics is told."""

    async def get_status(request: web.Request) -> web.Response:
        value = await status()
        return json_response({**value, "health": health(value)})

    async def livez(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        found = health(await status())
        if not (well := found["well"]):
            raise Problem("not-known" if well is None else "not-well", found["why"])
        return web.Response(text="ok\n")

    async def metrics(request: web.Request) -> web.Response:
        await asyncio.to_thread(refresh)
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def openapi(request: web.Request) -> web.Response:
        return json_response(describe(request.app))

    app = web.Application(middlewares=[_problems])
    app.router.add_get("/v1/status", get_status)
    app.router.add_get("/livez", livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi)
    return app


def add_run_routes(
    app: web.Application,
    chain: ChainFile,
    peers: Callable[[], Awaitable[list[View]]],
    events: EventLog,
    me: str = "",
) -> None:
    """What a run looks like from any member: /v1/peers, /v1/stages, /v1/rounds, /v1/events, /v1/explain, and the page of all that.
    `me`: the cluster that explanations call this node."""

    async def get_peers(request: web.Request) -> web.Response:
        return json_response(await peers())

    async def get_stages(request: web.Request) -> web.Response:
        return json_response(await asyncio.to_thread(views.stages, chain.manifest, chain.head))

    async def get_rounds(request: web.Request) -> web.Response:
        """All of them, or `?last=`: so many."""
        last = request.query.get("last", "")
        if last and not (last.isascii() and last.isdecimal() and len(last) < 10):
            raise Problem("no-number", "how many? /v1/rounds?last=NUMBER")
        text = await asyncio.to_thread(chain.rows, max(0, chain.length - int(last)) if last else 0)
        return web.Response(text=text, content_type="application/json")

    async def get_round(request: web.Request) -> web.Response:
        text = request.match_info["number"]
        detail = chain.detail(int(text)) if text.isdecimal() and len(text) < 10 else None
        if detail is None:
            raise Problem("no-such-round", f"no commit for round {text[:10]}")
        return web.Response(text=detail, content_type="application/json")

    app.router.add_get("/v1/peers", get_peers)
    app.router.add_get("/v1/stages", get_stages)
    app.router.add_get("/v1/rounds", get_rounds)
    app.router.add_get("/v1/rounds/{number}", get_round)
    app.router.add_get("/", page())
    app.router.add_get("/v1/events", _stream(events))
    app.router.add_get("/v1/explain/{number}", _explainer(chain, events, me))


def _explainer(chain: ChainFile, events: EventLog, me: str) -> Handler:
    async def get_explanation(request: web.Request) -> web.Response:
        number, peer = request.match_info["number"], request.query.get("peer", "")
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and len(peer) <= limits.TEXT_CHARACTERS):
            raise Problem("no-round", "which round? /v1/explain/NUMBER")
        try:
            said = await asyncio.to_thread(explain, chain, lambda round: events.read(0, round), int(number), peer, me)
        except LocalError as error:
            raise Problem("no-such-round", str(error)) from error
        return json_response(said)

    return get_explanation


def _stream(events: EventLog) -> Handler:
    """Server-sent events: all that are kept, or `?last=` so many, or from the one after `Last-Event-ID` or `?after=`; `?follow=no`
    ends with the newest."""
    readers = 0

    async def get_events(request: web.Request) -> web.StreamResponse:
        nonlocal readers
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "0")
        last = request.query.get("last", "0")
        if not all(text.isascii() and text.isdecimal() and len(text) < 17 for text in (after, last)):
            raise Problem("no-event-id", "events are numbered: ?after=NUMBER")
        if int(last) and "Last-Event-ID" not in request.headers:
            after = str(max(int(after), events.newest - int(last)))
        if readers >= limits.EVENT_STREAMS:
            raise Problem("too-many-readers", f"{limits.EVENT_STREAMS} readers of events are served already")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        readers += 1
        try:
            await _send(events, int(after), request.query.get("follow") != "no", response)
        finally:
            readers -= 1
        return response

    return get_events


async def _send(events: EventLog, after: int, follow: bool, response: web.StreamResponse) -> None:
    async with aclosing(events.follow(after)) as pages:
        async for page in pages:
            if not page and not follow:
                return
            text = "".join(f"id: {each.id}\nevent: {each.kind}\ndata: {json.dumps(each.view())}\n\n" for each in page)
            await response.write(text.encode() or b": nothing new\n\n")
