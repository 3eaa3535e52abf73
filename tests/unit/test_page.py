"""Tests of the page at `/`: it requests only its daemon, runs only its own script, and shows unknown peers' text as text."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from dilocox.protocol import events
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views import page as pages
from dilocox.views.api_listener import ApiListener
from dilocox.views.health import answers
from dilocox.views.http import add_run_routes, create_app
from dilocox.views.openapi import SAYS
from dilocox.views.query_params import Flag, takes
from dilocox.views.reasons import REASONS
from tests.browser import browser
from tests.helpers import Table, identity, manifest
from tests.sentences import Message

ROOT = Path(pages.__file__).parents[1]
HTML = Path(pages.__file__).with_name("page.html").read_text()
NASTY = '<img src=x onerror="document.title=1">[/]</script>'
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Tree(HTMLParser):
    """Checker that every element is closed; it stores the parts that a screen reader needs."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_labelled_and_asks_nobody_else():
    tree = Tree()
    tree.feed(HTML)
    assert not tree.open
    ids = {attributes["id"] for _, attributes in tree.tags if "id" in attributes}
    assert ("html", {"lang": "en"}) in tree.tags
    assert {"header", "main", "h1", "section"} <= {tag for tag, _ in tree.tags}
    for tag, attributes in tree.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "style")}, (tag, attributes)
        assert tag != "section" or "aria-label" in attributes or attributes["aria-labelledby"] in ids
    assert set(re.findall(r"https?://[^\"' ]*", HTML)) == {"http://www.w3.org/2000/svg"}, (
        "that one is a name, nobody fetches it"
    )
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "import("):
        assert way not in HTML
    assert set(re.findall(r'at\("([a-z-]+)"\)', HTML)) <= ids


def test_the_page_listens_to_every_event():
    (listed,) = re.findall(r"const kinds = \[(.*?)\]", HTML, re.DOTALL)
    assert set(re.findall(r'"([a-z-]+)"', listed)) == {each.kind for each in events.Event.__subclasses__()}


TRAFFIC = Traffic(download=Rates(usual_bytes_per_second=2e6))
TRAFFIC.bytes.update({("sent", "blob"): 2_500_000, ("sent", "coordination"): 12, ("received", "blob"): 3})
STATUS: dict[str, Any] = {
    "role": "node",
    "run": views.run(manifest()),
    "peer": identity(0).peer,
    "name": NASTY,
    "state": "training",
    "why": "on the roster",
    "advice": "",
    "round": 4,
    "round_why": "waiting for somebody",
    "reachable": False,
    "reach": NASTY,
    "on_roster": True,
    "counted": [True, True, False],
    "nobody_counted": False,
    "stands_still": False,
    "coordinator_connected": True,
    "excluded": [{"reason": "late", "detail": NASTY, "do": "be faster"}],
    "tokens_per_second": 1234.0,
    "loss": 2.0,
    "network": views.network(TRAFFIC),
    "seconds_left": 90.0,
    "attestation": {"kind": "simulated", "attested": True, "code": "", "reason": ""},
}


def test_four_answers():
    found = answers(STATUS, None)
    assert [each["question"] for each in found] == ["Reachable?", "In sync?", "In this round?", "Counted?"]
    assert [each["answer"] for each in found] == [False, None, True, False]
    assert [each in found[3]["says"] for each in ("in 2 of the last 3 rounds", "not counted: late")] == [True] * 2
    assert found[3]["do"] == "be faster"
    nobody = answers({**STATUS, "nobody_counted": True}, None)[3]["says"]
    assert [each in nobody for each in ("in 2 of the last 3 rounds", "no cluster: late")] == [True] * 2
    assert answers({**STATUS, "counted": [], "excluded": []}, True)[3]["answer"] is None
    alone = answers({**STATUS, "round": 268, "counted": [], "excluded": [], "stands_still": True}, True)
    assert alone[3]["says"] == Message("views/health.py", "none")
    assert (alone[4]["answer"], alone[4]["says"]) == (False, "waiting for somebody")


@pytest.fixture
async def served(tmp_path: Path):
    """Serve a node's API over a chain of three rounds, the last without peer 2."""
    table = Table(manifest(rounds={"count": 9})).genesis().train(2, seconds=2.0)
    table.absent(2)
    table.train(1, [0, 1], seconds=1.0)
    chain, log = ChainFile(tmp_path / "chain.db", table.run, views.describe), EventLog(tmp_path / "events.db")
    for commit in table.commits:
        chain.append(commit.envelope)
    tasks = Tasks()
    tasks.start(log.run(), "events")

    async def peers() -> list[views.View]:
        rows = views.peers(table.run, chain.head, services.PresenceList(), {}, chain.head.coordinator)
        return [{**row, "name": NASTY} for row in rows]

    async def status() -> views.View:
        return {**STATUS, "answers": answers(STATUS, None)}

    app = create_app(CollectorRegistry(), status)
    add_run_routes(app, chain, peers, log, identity(0).peer)
    door = ApiListener("127.0.0.1:0")
    await door.show(app)
    yield door.url, log
    await door.close()
    await tasks.close()
    log.close()
    chain.close()


async def test_every_route_is_described(served):
    url, _ = served
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as answer:
        told = await answer.json()
    assert told["openapi"].startswith("3.1")
    assert {"/", "/metrics", "/v1/status", "/v1/rounds/{number}", "/v1/events"} <= told["paths"].keys() <= SAYS.keys()
    (named,) = told["paths"]["/v1/rounds/{number}"]["get"]["parameters"]
    assert (named["name"], named["in"]) == ("number", "path")
    taken = {path: [each["name"] for each in way["get"].get("parameters", ())] for path, way in told["paths"].items()}
    assert {path: names for path, names in taken.items() if names} == {
        "/v1/rounds": ["last"],
        "/v1/rounds/{number}": ["number"],
        "/v1/explain/{number}": ["number", "peer"],
        "/v1/events": ["Last-Event-ID", "after", "last", "follow"],
    }
    assert all(
        each["schema"] and each["in"] in ("path", "query", "header")
        for way in told["paths"].values()
        for each in way["get"].get("parameters", ())
    )
    status = told["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    only = ("inner_step", "contributions", "kept_blobs")
    for daemon, field in zip(status["anyOf"], only, strict=False):
        assert [each for each in only if each in daemon["properties"]] == [field], "a daemon's own"


def test_a_handler_reads_only_what_openapi_says_of_it():
    """Check query parameters: one function reads them, which checks that they were declared."""
    reads = re.compile(r"\.query\b|\.headers(?:\.get\(|\[)\"(?!Authorization|Origin)|\.rel_url")
    found = {
        path.name
        for folder in ("views", "node/api", "coordinator")
        for path in (ROOT / folder).glob("*.py")
        if reads.search(path.read_text())
    }
    assert found <= {"query_params.py"}


async def test_what_makes_no_sense_beside_a_path_is_a_problem(served):
    url, _ = served
    wrong = {
        "/v1/rounds?last=many": "no-number",
        "/v1/rounds?last=1234567890": "no-number",
        "/v1/events?after=-1": "no-event-id",
        "/v1/events?last=%C2%B2": "no-event-id",
        f"/v1/explain/3?peer={'x' * 300}": "no-peer",
        "/v1/explain/x": "no-round",
        "/v1/rounds/x": "no-round",
        "/v1/rounds/2147483648": "no-round",
        "/v1/rounds/%C2%B2": "no-round",
    }
    async with aiohttp.ClientSession() as session:
        for path, code in wrong.items():
            async with session.get(url + path) as answer:
                assert (answer.status, (await answer.json())["code"]) == (400, code), path
        async with session.get(f"{url}/v1/rounds?last=2") as answer:
            assert [row["round"] for row in await answer.json()] == [2, 3]


async def test_who_reads_what_it_did_not_declare_is_at_fault():
    extra = Flag(name="extra", says="something", word="yes")

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=str(extra.read(request)))

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/?extra=yes")).status == 500
        takes(extra)(handler)
        answer = await client.get("/?extra=yes")
        assert (answer.status, await answer.text()) == (200, "True")


async def test_it_is_served_under_a_policy_that_names_its_own_script(served):
    url, _ = served
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert await response.text() == HTML
        policy = response.headers["Content-Security-Policy"]
    assert policy == pages.policy(HTML)
    assert policy != pages.policy(HTML.replace('"use strict"', '"use sloppy"'))
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")


async def test_a_browser_shows_it(served, tmp_path: Path):
    url, log = served
    async with browser(tmp_path / "browser", url + "/#3") as tab:
        await tab.wait("document.querySelectorAll('#answers .card').length === 6")
        assert await tab.evaluate("[...document.querySelectorAll('#answers .answer')].map(a => a.textContent).join()") == (
            "no,not known yet,yes,no,yes,2.5 MB"
        )
        assert await tab.evaluate("document.getElementById('well').textContent") == (
            "Is it well? no: Counted? in 2 of the last 3 rounds that counted a cluster; not counted: late – be faster"
        )
        line = await tab.evaluate("document.getElementById('answers').lastElementChild.textContent")
        assert "sent: blob 2.5 MB, coordination 12 B" in line
        assert "received: blob 3 B; at most 2.0 MB/s now" in line
        assert "SIMULATED" in await tab.evaluate("document.getElementById('answers').textContent")
        await tab.wait("document.querySelectorAll('#loss polyline').length === 2")
        assert await tab.wait("document.querySelectorAll('#rounds .good').length") == 8
        assert await tab.evaluate("[...document.querySelectorAll('#rounds .bad')].map(a => a.ariaLabel).join()") == "absent"
        await tab.wait("document.getElementById('explained-title').textContent.startsWith('Round 3: incomplete')")
        assert REASONS[pb.REASON_ABSENT].means in await tab.evaluate("document.getElementById('explanation').textContent")
        await tab.evaluate("document.querySelector('#rounds button').click()")
        await tab.wait("document.getElementById('explained-title').textContent.startsWith('Round 1: in the usual range')")
        log.add(events.WorkersEnded(NASTY))
        await tab.wait("document.getElementById('happened').textContent.includes('stage workers ended (<img')")
        await tab.wait("document.querySelectorAll('#peers tbody tr').length === 3")
        assert NASTY in await tab.evaluate("document.getElementById('peers').textContent")
        assert await tab.evaluate("document.querySelectorAll('img, script').length") == 1, "a stranger's name is text"
        assert await tab.evaluate("document.title") == "test – dilocox"
        light = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
        await tab.picture(tmp_path / "page.png")
        assert not [error for error in tab.errors if "favicon" not in error]


def plotted(points: str, values: list[float], of: list[float]) -> bool:
    """Return whether a line's points match these values; `of`: all values of its plot, which decide its scale."""
    least, most = min(0.999 * max(of), *of), max(of)
    heights = [float(point.partition(",")[2]) for point in points.split()]
    return heights == pytest.approx([190 - 168 * (value - least) / (most - least) for value in values], abs=0.06)


async def test_no_width_of_a_screen_is_too_small_for_the_page(served, tmp_path: Path):
    url, _ = served
    async with browser(tmp_path / "browser", url) as tab:
        await tab.wait("document.querySelectorAll('#rounds tbody th').length")
        for width in (320, 390, 768, 1280):
            await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width


async def test_the_page_has_the_numbers_of_the_rows_and_no_others(served, tmp_path: Path):
    """Compare the page; test_metrics.py compares `top`, `rounds` and /metrics with the same rows."""
    url, _ = served
    async with aiohttp.ClientSession() as session:

        async def ask(path: str) -> Any:
            async with session.get(f"{url}/v1/{path}") as answer:
                return await answer.json()

        rows = [row for row in await ask("rounds?last=9") if row["round"]]
        one_by_one = [await ask(f"rounds/{row['round']}") for row in rows]
        peers = await ask("peers")
    assert [row["round"] for row in rows] == [1, 2, 3]
    async with browser(tmp_path / "browser", url) as tab:
        await tab.wait("document.querySelectorAll('#rounds tbody tr').length === 4")
        await tab.wait("document.querySelectorAll('#peers tbody tr').length === 3")

        async def texts(query: str) -> list[str]:
            return list(await tab.evaluate(f"[...document.querySelectorAll({query!r})].map(each => each.textContent)"))

        async def lines(place: str) -> list[str]:
            query = f"[...document.querySelectorAll('#{place} polyline')].map(each => each.getAttribute('points'))"
            return list(await tab.evaluate(query))

        losses = [[row[kind] for row in rows if row[kind] is not None] for kind in ("loss", "evaluation_loss")]
        drawn = await lines("loss")
        assert all(plotted(points, values, losses[0] + losses[1]) for points, values in zip(drawn, losses, strict=True)), (
            drawn,
            losses,
        )
        seconds = [row["seconds"] for row in rows]
        half = [row["collect_seconds"] for row in rows if row["collect_seconds"]]
        assert plotted((await lines("seconds"))[0], seconds, seconds + half)
        assert (await texts("#rounds tbody tr:last-child .quiet"))[:3] == [f"{value:.1f}" for value in seconds]
        marks = await texts("#rounds tbody .good")
        assert len(marks) == sum(len(each["clusters"]) for each in one_by_one) == sum(row["counted"] for row in rows)
        assert len(await texts("#rounds tbody .bad")) == sum(len(each["excluded"]) for each in one_by_one)
        cells = await texts("#peers tbody td:nth-child(8)")
        told = [row["standing"] for row in peers if row["standing"]]
        assert [f"{each['earned']} of {each['of']}" for each in told] == [
            cell.partition(",")[0] for cell in cells if cell != "–"
        ]
        assert len(told) == 3
        assert len(cells) == len(peers)
        assert not [error for error in tab.errors if "favicon" not in error]
