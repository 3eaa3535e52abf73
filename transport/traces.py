"""Rounds as OpenTelemetry traces, for whoever keeps them: OTLP over HTTP, in JSON (opentelemetry.io/docs/specs/otlp).

Spans are made of the events that everybody reads, when a round is over, and have no times of their own. A round is one trace,
whoever tells of it: its ids follow from run and round, so what a coordinator and its nodes send comes together.

    round             coordinator   from its opening to its commit
      collect         coordinator   until the ballot
      vote            coordinator   from the ballot to the commit
      cluster round   node          from the beginning of its phase until the round's commit is applied
        train         node          the inner steps, and encoding
        exchange      node          from the announced payload until the commit is applied

A round under way when a daemon starts is not told by it. Nothing waits for who keeps traces: what cannot be sent is gone.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.transport.event_log import EventLog, Happened
from dilocox.transport.notify import NO_HEADERS, is_url, post_json, read_secret

__all__ = ["Collector", "Rounds", "Span", "Tracer", "parse_collector"]

log = logging.getLogger(__name__)

INTERNAL, FAILED = 1, 2
"""SPAN_KIND_INTERNAL, STATUS_CODE_ERROR."""
NANOSECONDS = 1_000_000_000


class Collector(NamedTuple):
    url: str
    headers: Mapping[str, str] = NO_HEADERS
    """Such as who asks."""

    @property
    def name(self) -> str:
        """For a log: shows no secret."""
        return f"the collector of traces at {urlsplit(self.url).hostname}"


def parse_collector(text: str) -> Collector:
    """A URL to whose path `/v1/traces` is added, or @FILE that holds it, and headers in lines of their own (`Authorization: …`).
    Raises ConfigError, which does not show it."""
    url, *lines = read_secret("--traces", text).splitlines() or [""]
    if not is_url(url):
        raise ConfigError("--traces is no URL of a collector of OpenTelemetry traces, such as http://127.0.0.1:4318")
    headers = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines if line.strip())}
    if not all(re.fullmatch(r"[A-Za-z0-9_-]+", name) and value and value.isprintable() for name, value in headers.items()):
        raise ConfigError("--traces: a line after the URL is no header, such as Authorization: Bearer …")
    parts = urlsplit(url)
    if parts.username and "authorization" in {name.lower() for name in headers}:
        raise ConfigError("--traces: the URL and a header both say who asks: leave one of them out")
    return Collector(parts._replace(path=parts.path.rstrip("/") + "/v1/traces", fragment="").geturl(), headers)


@dataclass(frozen=True)
class Span:
    """`name` and `parent` (empty: none), with `who`, say which span of its trace it is."""

    round: int
    name: str
    parent: tuple[str, str]
    """Who, and its name."""
    who: str
    """Peer id of who tells it; empty: the run's, whoever is its coordinator."""
    begin: float
    end: float
    """Both seconds since 1970."""
    facts: Mapping[str, int | str | bool] = field(default_factory=dict)
    failed: str = ""
    """Why it did not go well."""


NOBODY = ("", "")
ROUND, CLUSTER = "round", "cluster round"


class Rounds:
    """Spans from events, one after the other."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._began: float | None = None
        """When the local phase under way began; None: nobody saw it."""
        self._announced: dict[int, tuple[float | None, Happened]] = {}
        """By round: when its phase began, and the end of that."""
        self._ballots: dict[int, Happened] = {}

    def saw(self, event: Happened) -> list[Span]:
        match event.kind:
            case "phase-ended":
                self._announced[event.body["round"]] = self._began, event
                self._began = event.seconds
            case "commit-applied":
                if event.body["applied_at_step"] == 0:  # the phase begins with it
                    self._began = event.seconds
                return self._applied(event)
            case "workers-ended":
                self._began = None
            case "state-changed" if event.body["state"] == "paused":
                self._began = None
            case "ballot-opened":
                self._ballots = {event.body["round"]: event}
            case "round-closed":
                return self._closed(event)
        return []

    def _applied(self, event: Happened) -> list[Span]:
        number, end = event.body["round"], event.seconds
        found = self._announced.get(number)
        self._announced = {round: each for round, each in self._announced.items() if round > number}
        if found is None:
            return []
        began, phase = found
        counted, me = event.body["counted"], (self._me, CLUSTER)
        facts = {"counted": counted, "clusters": event.body["clusters"], "applied_at_step": event.body["applied_at_step"]}
        begin = began if began is not None else phase.seconds
        spans = [Span(number, CLUSTER, ("", ROUND), self._me, begin, end, facts, "" if counted else "not counted")]
        if began is not None:
            steps = {"inner_steps": phase.body["inner_steps"]}
            spans.append(Span(number, "train", me, self._me, began, phase.seconds, steps))
        payload = {"payload_bytes": phase.body["payload_bytes"]}
        return [*spans, Span(number, "exchange", me, self._me, phase.seconds, end, payload)]

    def _closed(self, event: Happened) -> list[Span]:
        number, end = event.body["round"], event.seconds
        begin, top = end - event.body["seconds"], ("", ROUND)
        facts = {"counted": event.body["counted"], "not_counted": event.body["not_counted"]}
        spans = [Span(number, ROUND, NOBODY, "", begin, end, facts)]
        if (ballot := self._ballots.get(number)) is not None:
            at = min(end, begin + ballot.body["seconds"])
            spans.append(Span(number, "collect", top, "", begin, at, _last(ballot)))
            spans.append(Span(number, "vote", top, "", at, end, _last(event)))
        return spans


def _last(event: Happened) -> Mapping[str, int | str | bool]:
    """Whose contribution, or vote, came last."""
    return {"last": event.body["last"][-1]["cluster"]} if event.body["last"] else {}


class Tracer:
    def __init__(self, collector: Collector, events: EventLog, about: Mapping[str, str]) -> None:
        """`about`: what tells this daemon from others: name, run, run_id, peer, role."""
        self._collector, self._events, self._about = collector, events, about
        self._rounds, self._newest = Rounds(about["peer"]), events.newest
        self._heard = True

    async def run(self) -> None:
        """For ever."""
        async for page in self._events.follow(self._newest):
            spans = [span for event in page for span in self._rounds.saw(event)]
            if not spans:
                continue
            why = await post_json(
                self._collector.url, json.dumps(document(spans, self._about)).encode(), self._collector.headers
            )
            if why and self._heard:
                log.warning("%s does not take them: %s", self._collector.name, why)
            self._heard = not why


def document(spans: Iterable[Span], about: Mapping[str, str]) -> dict[str, Any]:
    """An ExportTraceServiceRequest, in OTLP's JSON."""
    resource = {
        "service.name": f"dilocox-{about['role']}",
        "service.instance.id": about["peer"],
        "service.version": metadata.version("dilocox"),
        "dilocox.name": about["name"],
        "dilocox.run": about["run"],
    }
    told = [_told(span, about["run_id"]) for span in spans]
    scope = {"scope": {"name": "dilocox"}, "spans": told}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _told(span: Span, run_id: str) -> dict[str, Any]:
    def id_of(who: str, name: str) -> str:
        return sha256(f"{run_id} {span.round} {who} {name}".encode())[:8].hex()

    return {
        "traceId": sha256(f"{run_id} {span.round}".encode())[:16].hex(),
        "spanId": id_of(span.who, span.name),
        **({"parentSpanId": id_of(*span.parent)} if span.parent != NOBODY else {}),
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": _nanoseconds(span.begin),
        "endTimeUnixNano": _nanoseconds(max(span.begin, span.end)),
        "attributes": _attributes({"dilocox.round": span.round, **{f"dilocox.{key}": v for key, v in span.facts.items()}}),
        **({"status": {"code": FAILED, "message": span.failed}} if span.failed else {}),
    }


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * NANOSECONDS))


_KINDS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (bool, "boolValue", bool),  # before int, which it is too
    (int, "intValue", str),  # 64 bits are text in JSON
    (str, "stringValue", str),
)


def _attributes(facts: Mapping[str, int | str | bool]) -> list[dict[str, Any]]:
    def value(fact: int | str | bool) -> dict[str, Any]:
        return next({name: make(fact)} for kind, name, make in _KINDS if isinstance(fact, kind))

    return [{"key": key, "value": value(fact)} for key, fact in facts.items()]
