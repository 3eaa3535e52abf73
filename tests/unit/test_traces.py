"""Rounds as OpenTelemetry traces: spans of the events that everybody reads, at a collector that somebody else wrote."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dilocox.protocol import events
from dilocox.protocol.errors import ConfigError
from dilocox.transport.event_log import EVENTS, EventLog, Happened
from dilocox.transport.tasks import Tasks
from dilocox.transport.traces import Collector, Rounds, Span, Tracer, document, parse_collector
from tests.helpers import identity, until

ME, OTHER = identity(0).peer, identity(1).peer
ABOUT = {"name": "attic", "run": "test", "run_id": "ab" * 32, "peer": ME, "role": "node"}


def at(seconds: float, event: events.Event) -> Happened:
    return Happened(1, seconds, event.kind, event.view())


def phase(round: int) -> events.Event:
    return events.PhaseEnded(round, 20, 2.5, 1000)


def applied(round: int, step: int, counted: bool = True) -> events.Event:
    return events.CommitApplied(round, counted, 3, step, "abc")


def told(rounds: Rounds, *happened: tuple[float, events.Event]) -> list[tuple[str, int, float, float]]:
    """(name, round, begin, end) of every span."""
    return [(s.name, s.round, s.begin, s.end) for seconds, event in happened for s in rounds.saw(at(seconds, event))]


def test_a_node_trains_from_where_its_phase_began_and_exchanges_until_the_commit_is_applied():
    """Round 1 is synchronous: its commit is applied before the next phase's first step. Round 2's comes amid a phase."""
    found = told(
        Rounds(ME),
        (10.0, applied(0, 0)),
        (30.0, phase(1)),
        (34.0, applied(1, 0)),
        (54.0, phase(2)),
        (60.0, applied(2, 6)),
        (74.0, phase(3)),
        (75.0, applied(3, 1)),
    )
    assert found == [
        ("cluster round", 1, 10.0, 34.0),
        ("train", 1, 10.0, 30.0),
        ("exchange", 1, 30.0, 34.0),
        ("cluster round", 2, 34.0, 60.0),
        ("train", 2, 34.0, 54.0),
        ("exchange", 2, 54.0, 60.0),
        ("cluster round", 3, 54.0, 75.0),
        ("train", 3, 54.0, 74.0),
        ("exchange", 3, 74.0, 75.0),
    ]


@pytest.mark.parametrize("broken", [events.WorkersEnded("killed"), events.StateChanged("paused", "until `dilocox resume`")])
def test_what_nobody_saw_begin_has_no_time(broken: events.Event):
    """Workers that start again, or a pause, are no training."""
    found = told(Rounds(ME), (10.0, applied(0, 0)), (30.0, phase(1)), (31.0, broken), (90.0, phase(2)), (92.0, applied(2, 3)))
    assert found == [("cluster round", 2, 90.0, 92.0), ("exchange", 2, 90.0, 92.0)]
    assert told(Rounds(ME), (92.0, applied(2, 3))) == [], "a round under way when it started"


def closed(round: int, seconds: float) -> events.Event:
    return events.RoundClosed(round, 2, 1, seconds, (), (events.Arrival(OTHER, 9.5),))


def test_a_coordinator_tells_of_the_ballot():
    rounds = Rounds(ME)
    ballot = events.BallotOpened(4, 3, 8.0, (events.Arrival(ME, 7.0), events.Arrival(OTHER, 8.0)))
    assert not rounds.saw(at(108.2, ballot))
    whole, collect, vote = rounds.saw(at(110.0, closed(4, 10.0)))
    assert [(s.name, s.begin, s.end) for s in (whole, collect, vote)] == [
        ("round", 100.0, 110.0),
        ("collect", 100.0, 108.0),
        ("vote", 108.0, 110.0),
    ]
    assert (whole.facts["counted"], whole.facts["not_counted"]) == (2, 1)
    assert collect.facts == vote.facts == {"last": OTHER}
    assert told(rounds, (120.0, closed(5, 10.0))) == [("round", 5, 110.0, 120.0)], "no ballot of another round"


def spans(told: list[Span], **about: str) -> list[dict[str, Any]]:
    [resource] = document(told, {**ABOUT, **about})["resourceSpans"]
    [scope] = resource["scopeSpans"]
    return scope["spans"]


def test_what_a_coordinator_and_its_nodes_tell_of_a_round_is_one_trace():
    coordinator, node, other = Rounds(""), Rounds(ME), Rounds(OTHER)
    for rounds in (node, other):
        told(rounds, (100.0, applied(3, 0)), (105.0, phase(4)))
    whole = spans(coordinator.saw(at(110.0, closed(4, 10.0))), role="coordinator", peer="somebody")
    mine, theirs = (spans(rounds.saw(at(111.0, applied(4, 2)))) for rounds in (node, other))
    assert {span["traceId"] for span in (*whole, *mine, *theirs)} == {whole[0]["traceId"]}
    assert len({span["spanId"] for span in (*whole, *mine, *theirs)}) == 7
    assert "parentSpanId" not in whole[0]
    for node_round, train, exchange in (mine, theirs):
        assert node_round["parentSpanId"] == whole[0]["spanId"]
        assert train["parentSpanId"] == exchange["parentSpanId"] == node_round["spanId"]
    assert spans(node.saw(at(112.0, applied(5, 2)))) == []
    told(node, (115.0, phase(6)))
    [later, *_] = spans(node.saw(at(120.0, applied(6, 2, counted=False))))
    assert later["traceId"] != whole[0]["traceId"]
    assert later["status"] == {"code": 2, "message": "not counted"}
    assert [len(bytes.fromhex(later[key])) for key in ("traceId", "spanId")] == [16, 8]


async def test_a_collector_gets_them_and_nobody_waits_for_one_that_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    bodies, status = list[dict[str, Any]](), [503]

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        assert request.headers["Authorization"] == "Bearer of the test"
        bodies.append(await request.json())
        return web.Response(status=status[0])

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with TestServer(app) as server:
        (told := tmp_path / "collector").write_text(f"{server.make_url('/')}\n\nAuthorization: Bearer of the test\n")
        log, tasks = EventLog(tmp_path / EVENTS), Tasks()
        log.add(applied(0, 0))
        log.flush()
        tasks.start(log.run(), "events")
        tasks.start(Tracer(parse_collector(f"@{told}"), log, ABOUT).run(), "traces")
        await asyncio.sleep(0)
        told_of = list[int]()
        for number in (1, 2, 3):
            told_of.append(number)
            log.add(phase(number))
            log.add(events.StateChanged("training", "with a secret loss of 2.5"))
            log.add(applied(number, 5))
            await until(lambda: len(bodies) == len(told_of))
            status[0] = 503 if number == 1 else 200
        await tasks.close()
        log.close()
    [resource] = bodies[-1]["resourceSpans"]
    known = {item["key"]: item["value"] for item in resource["resource"]["attributes"]}
    assert known["service.name"] == {"stringValue": "dilocox-node"}
    assert known["service.instance.id"] == {"stringValue": ME}
    [scope] = resource["scopeSpans"]
    node_round, train, exchange = scope["spans"]
    assert [each["name"] for each in scope["spans"]] == ["cluster round", "train", "exchange"]
    assert int(train["startTimeUnixNano"]) <= int(train["endTimeUnixNano"]) == int(exchange["startTimeUnixNano"])
    facts = {item["key"]: item["value"] for item in node_round["attributes"]}
    assert facts["dilocox.round"] == {"intValue": "3"}
    assert facts["dilocox.counted"] == {"boolValue": True}
    assert "loss" not in json.dumps(bodies), "under a privacy budget nobody hears of it"
    refused = [record.getMessage() for record in caplog.records if "does not take them" in record.getMessage()]
    assert refused == ["the collector of traces at 127.0.0.1 does not take them: it answered 503"], "once, until it does"


def test_where_they_go_is_a_url_and_may_be_a_secret(tmp_path: Path):
    (tmp_path / "collector").write_text("https://traces.example/SECRET/\n")
    found = parse_collector(f"@{tmp_path / 'collector'}")
    assert found == Collector("https://traces.example/SECRET/v1/traces")
    assert found.name == "the collector of traces at traces.example"
    assert parse_collector("http://some.example/otlp?team=SECRET").url == "http://some.example/otlp/v1/traces?team=SECRET"
    (tmp_path / "no header").write_text("https://traces.example/\nBearer SECRET\n")
    (tmp_path / "twice").write_text("https://me:SECRET@traces.example/\nauthorization: Bearer SECRET\n")
    with pytest.raises(ConfigError, match="both say who asks"):
        parse_collector(f"@{tmp_path / 'twice'}")
    for wrong in ("SECRET", "ftp://SECRET", "http://", f"@{tmp_path / 'nowhere'}", f"@{tmp_path / 'no header'}"):
        with pytest.raises(ConfigError, match="--traces") as caught:
            parse_collector(wrong)
        assert "SECRET" not in str(caught.value)
