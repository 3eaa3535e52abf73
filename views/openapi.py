"""`/openapi.json`: what a daemon's API answers, for those who write programs against it."""

import re
from importlib import metadata
from typing import Any

from aiohttp import web

from dilocox.views.json_schema import ANSWERS, LISTS
from dilocox.views.query_params import declared

__all__ = ["SAYS", "describe"]

SAYS = {
    "/": "The page",
    "/livez": "Liveness of the daemon",
    "/readyz": "Health: 200, or 503 with the reason",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This",
    "/v1/status": "State of this daemon: reachable, in sync, in this round, counted. The data of `dilocox status`",
    "/v1/peers": "Peers of the run",
    "/v1/stages": "Stages, with the replicas of each",
    "/v1/rounds": "Closed rounds",
    "/v1/rounds/{number}": "One round in full",
    "/v1/explain/{number}": "Reasons why a round was slow, or did not count a cluster",
    "/v1/events": "Events, as server-sent events",
    "/v1/attest/{peer}": "Challenge a peer for evidence",
    "/v1/pause": "Pause training until resumed",
    "/v1/resume": "Resume training",
    "/v1/leave": "Leave the run, and end the daemon",
}
"""Summaries, by path."""
OPERATOR = ("/v1/pause", "/v1/resume", "/v1/leave")
"""Paths that need `Authorization: Bearer` with the content of api.key."""


def _answer(path: str) -> dict[str, Any]:
    """Return the schema of a path's answer, from json_schema.py: `a.b`, `a[]`, `*` as there."""
    answer: dict[str, Any] = {"description": "the answer"}
    if path in ANSWERS:
        objects: list[dict[str, Any]] = [
            {"type": "object", "properties": {name: {"description": says} for name, says in fields.items()}}
            for fields in ANSWERS[path]
        ]
        each = objects[0] if len(objects) == 1 else {"anyOf": objects}
        schema = {"type": "array", "items": each} if path in LISTS else each
        answer["content"] = {"application/json": {"schema": schema}}
    return answer


def describe(app: web.Application) -> dict[str, Any]:
    """An OpenAPI 3.1 document of an app's routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.resource is None or route.method not in ("GET", "POST"):
            continue
        path = route.resource.canonical
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", path)
        ] + [each.view for each in declared(route.handler)]
        wrong = {"description": "reason", "content": {"application/problem+json": {}}}
        paths.setdefault(path, {})[route.method.lower()] = {
            "summary": SAYS.get(path, path),
            **({"parameters": parameters} if parameters else {}),
            **({"security": [{"operator": []}]} if path in OPERATOR else {}),
            "responses": {"200": _answer(path), "default": wrong},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "dilocox", "version": metadata.version("dilocox")},
        "paths": paths,
        "components": {"securitySchemes": {"operator": {"type": "http", "scheme": "bearer"}}},
    }
