"""Common parts of the node's and the coordinator's HTTP APIs: problem documents, JSON, health and metrics."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, generate_latest

from dilocox.protocol import limits
from dilocox.protocol.member.node_status import Status
from dilocox.transport.limits.addresses import endpoint_of_socket
from dilocox.transport.limits.connection_limits import ConnectionLimits
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views.explain import NotThere, explain, named
from dilocox.views.health import health
from dilocox.views.metrics import Healthy
from dilocox.views.openapi import describe
from dilocox.views.page import page
from dilocox.views.query_params import Flag, Handler, Number, Problem, Word, takes

__all__ = ["Problem", "add_run_routes", "create_app", "json_response", "own_address", "within_limits", "wrong_address"]

View = views.View


LAST_ROUNDS = Number(
    name="last",
    says="number of the newest rounds to return; all without it",
    digits=9,
    code="no-number",
    wrong="last is not a number: use /v1/rounds?last=NUMBER",
)
PEER = Word(
    name="peer",
    says="beginning of a cluster's id: explain the result of its work",
    longest=limits.TEXT_CHARACTERS,
    code="no-peer",
    wrong="peer is missing: use /v1/explain/NUMBER?peer=PEER",
)
_numbered = partial(Number, code="no-event-id", wrong="after is not a number: use ?after=NUMBER", digits=16)
SEEN = _numbered(name="Last-Event-ID", says="as `after`, sent on reconnection; it overrides the others", header=True)
AFTER = _numbered(name="after", says="events after this id")
LAST_EVENTS = _numbered(name="last", says="number of the newest events")
TO_THE_END = Flag(name="follow", says="`no`: end after the newest event", word="no")


def json_response(value: Any) -> web.Response:
    return web.json_response(value, dumps=lambda v: json.dumps(v, allow_nan=False))


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        body = problem.document()
    except web.HTTPException as error:
        says = f"{request.method} {request.path[:100]}: {error.reason}"
        other = isinstance(error, web.HTTPMethodNotAllowed)
        body = Problem("wrong-method" if other else "no-such-path", says).document(error.status)
    return web.json_response(body, status=body["status"], content_type="application/problem+json")


def own_address(named: str) -> Middleware:
    """Reject requests that `wrong_address` rejects. Probes and metrics answer every request."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1/"):
            wrong = wrong_address(request.host, request.headers.get("Origin"), named)
            if wrong is not None:
                raise wrong
        return await handler(request)

    return check


def within_limits(connections: ConnectionLimits) -> Middleware:
    """Return a middleware that rejects requests beyond their connection's budget, and closes a connection that continues."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        peer = request.get_extra_info("peername")
        if peer is not None:
            endpoint = endpoint_of_socket(peer)
            if (seconds := connections.table.admit(endpoint, "")) is None:
                if connections.table.is_excessive(endpoint) and request.transport is not None:
                    request.transport.abort()
                raise Problem("too-many-requests", "this connection sends too many requests")
            if seconds:
                await asyncio.sleep(seconds)
        return await handler(request)

    return check


def wrong_address(host: str, origin: str | None, named: str) -> Problem | None:
    """Return a problem if a web page may have sent the request: from another origin, or under a name that its owner points
    here (DNS rebinding). A valid Host is an IP address, localhost, or `named`, the listening name. Raises nothing,
    whatever the headers are."""
    name = _split(host).hostname or ""
    if name not in ("localhost", named) and not _is_ip(name):
        return Problem("wrong-host", "use the IP address, localhost, or the name in --api")
    if origin is not None and _split(origin, "").netloc != host:
        return Problem("wrong-origin", "pages of other sites may not send this request")
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

    found_well = Healthy()
    registry.register(found_well)

    async def metrics(request: web.Request) -> web.Response:
        await asyncio.to_thread(refresh)
        found_well.well = health(await status())["well"]
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
    stands: Callable[[], Status] | None = None,
) -> None:
    """Add the routes that every member serves: /v1/peers, /v1/stages, /v1/rounds, /v1/events, /v1/explain, and the page.
    `me`: the cluster that explanations call this node. `stands`: its current state."""

    async def get_peers(request: web.Request) -> web.Response:
        return json_response(await peers())

    async def get_stages(request: web.Request) -> web.Response:
        return json_response(await asyncio.to_thread(views.stages, chain.manifest, chain.head))

    @takes(LAST_ROUNDS)
    async def get_rounds(request: web.Request) -> web.Response:
        last = LAST_ROUNDS.read(request)
        text = await asyncio.to_thread(chain.rows, max(0, chain.length - last) if last is not None else 0)
        return web.Response(text=text, content_type="application/json")

    async def get_round(request: web.Request) -> web.Response:
        number = _round_of(request)
        detail = chain.detail(number)
        if detail is None:
            raise Problem("no-such-round", f"no commit for round {number}")
        return web.Response(text=detail, content_type="application/json")

    app.router.add_get("/v1/peers", get_peers)
    app.router.add_get("/v1/stages", get_stages)
    app.router.add_get("/v1/rounds", get_rounds)
    app.router.add_get("/v1/rounds/{number}", get_round)
    app.router.add_get("/", page())
    app.router.add_get("/v1/events", _stream(events))
    app.router.add_get("/v1/explain/{number}", _explainer(chain, events, peers, me, stands))


def _round_of(request: web.Request) -> int:
    """Raises Problem where the path names none."""
    text = request.match_info["number"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < limits.ROUNDS):
        raise Problem("no-round", "the path must end with the number of a round")
    return int(text)


def _explainer(
    chain: ChainFile,
    events: EventLog,
    peers: Callable[[], Awaitable[list[View]]],
    me: str,
    stands: Callable[[], Status] | None,
) -> Handler:
    @takes(PEER)
    async def get_explanation(request: web.Request) -> web.Response:
        number, peer = _round_of(request), PEER.read(request)
        try:
            now = stands() if stands is not None else None
            said = await asyncio.to_thread(explain, chain, lambda round: events.read(0, round), number, peer, me, now)
        except NotThere as error:
            raise Problem(error.code, str(error)) from error
        return json_response(named(said, {row["peer"]: row["name"] for row in await peers()}))

    return get_explanation


def _stream(events: EventLog) -> Handler:
    """Server-sent events: all that are kept, or `?last=` so many, or from the one after `Last-Event-ID` or `?after=`; `?follow=no`
    ends with the newest."""
    readers = 0

    @takes(SEEN, AFTER, LAST_EVENTS, TO_THE_END)
    async def get_events(request: web.Request) -> web.StreamResponse:
        nonlocal readers
        seen, last = SEEN.read(request), LAST_EVENTS.read(request)
        after = seen if seen is not None else AFTER.read(request) or 0
        if last and seen is None:
            after = max(after, events.newest - last)
        if readers >= limits.EVENT_STREAMS:
            raise Problem("too-many-readers", f"the limit of {limits.EVENT_STREAMS} event streams is reached")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        readers += 1
        try:
            with suppress(ConnectionResetError):  # who reads may go, in the middle of an event too
                await _send(events, after, not TO_THE_END.read(request), response)
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
