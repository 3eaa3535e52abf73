"""Tests of a daemon's answers before its API starts, and of the agreement of probes, exit code and page about its health."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from dilocox.cli.look.status import status_rows, verdict
from dilocox.cli.main import app
from dilocox.protocol.errors import PortError
from dilocox.transport.process.health import running_daemon
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.views.api_listener import ApiListener, open_listener
from dilocox.views.health import (
    ON_ITS_WAY,
    answers,
    answers_of_coordinator,
    answers_of_holder,
    health,
)
from dilocox.views.http import create_app
from tests.browser import browser

NODE: dict[str, Any] = {
    "role": "node",
    "state": "training",
    "why": "on the roster",
    "advice": "",
    "reachable": True,
    "reach": "reachable",
    "on_roster": True,
    "counted": [True, True],
    "nobody_counted": False,
    "round": 9,
    "round_why": "waiting for somebody",
    "stands_still": False,
    "coordinator_connected": True,
    "excluded": [],
}
PROBE = [sys.executable, "-P", "-m", "dilocox.transport.process.health"]
MISSED = [{"reason": "late", "detail": "", "do": "be faster"}]


def judged(agreed: bool | None = True, **changes: Any) -> dict[str, Any]:
    value = {**NODE, **changes}
    return health({**value, "answers": answers(value, agreed)})


@pytest.mark.parametrize(
    ("well", "agreed", "changes"),
    [
        (True, True, {}),
        (True, True, {"reachable": False}),  # relays store its results
        (True, None, {"state": "paused", "on_roster": False}),
        (True, None, {"finished": True, "on_roster": False, "counted": [False], "excluded": MISSED}),
        (None, None, {}),
        (None, True, {"counted": []}),
        (None, True, {"state": "warming up", "on_roster": False, "counted": [False, False]}),  # those were before it came
        (None, True, {"state": "synchronising"}),
        (False, True, {"stands_still": True}),
        (None, True, {"stands_still": True, "coordinator_connected": False}),  # its report is old
        (False, True, {"stands_still": True, "counted": []}),
        (False, True, {"counted": [True, False], "excluded": MISSED}),
        (False, True, {"counted": [False], "excluded": MISSED}),
        (False, True, {"state": "warming up", "counted": [True, False], "on_roster": False}),
        (False, True, {"state": "resting", "on_roster": False}),
        (False, True, {"state": "refused", "on_roster": False, "counted": []}),
        (False, False, {}),
        (False, False, {"state": "synchronising"}),
    ],
)
def test_a_node_is_well_when_it_does_what_it_should(well: bool | None, agreed: bool | None, changes: dict[str, Any]):
    found = judged(agreed, **changes)
    assert found["well"] is well, found
    assert found["why"]


def test_what_is_on_its_way_is_not_known_yet():
    for state in ON_ITS_WAY:
        assert judged(None, state=state, on_roster=False, counted=[])["well"] is None


def test_coordinator_and_holder():
    def well(given: list[dict[str, Any]]) -> bool | None:
        found: bool | None = health({"answers": given})["well"]
        return found

    assert well(answers_of_coordinator("collecting", False, "waiting for 1")) is True
    assert well(answers_of_coordinator("gathering", False, "waiting for 3 clusters")) is None
    assert well(answers_of_coordinator("collecting", True, "1 of 3 clusters are heard")) is False
    assert well(answers_of_holder(True, "", True, "")) is True
    assert well(answers_of_holder(None, "", True, "")) is None
    for wrong in ((False, "", True, ""), (True, "", False, ""), (True, "", True, "the archive cannot be used")):
        assert well(answers_of_holder(*wrong)) is False
    for dialled in (True, False, None):
        assert well(answers_of_holder(dialled, "", True, "", asked=False)) is True, "it only reads"
    assert well(answers_of_holder(False, "", True, "the archive cannot be used", asked=False)) is False


@pytest.mark.parametrize(
    ("changes", "status", "code", "exit", "probe"),
    [
        ({}, 200, None, 0, 0),
        ({"counted": []}, 503, "not-known", 4, 0),
        ({"counted": [False], "excluded": MISSED}, 503, "not-well", 6, 1),
    ],
)
async def test_probes_exit_codes_and_page_say_the_same(
    tmp_path: Path, changes: dict[str, Any], status: int, code: str | None, exit: int, probe: int
):
    value = {**NODE, **changes}

    async def told() -> dict[str, Any]:
        return {**value, "answers": answers(value, True)}

    with closing(DataDirectory(tmp_path / "node")) as home:
        async with open_listener("127.0.0.1:0", home, b"run", "x") as door, aiohttp.ClientSession() as session:
            await door.show(create_app(CollectorRegistry(), told))
            async with session.get(f"{door.url}/v1/status") as answer:
                shown = await answer.json()
            assert verdict(shown) == exit
            async with session.get(f"{door.url}/readyz") as answer:
                assert answer.status == status
                assert code is None or (await answer.json())["code"] == code
                assert code is None or (await answer.json())["title"] == shown["health"]["why"]
            environment = {**os.environ, "DILOCOX_HOME": str(tmp_path)}
            ran = await asyncio.create_subprocess_exec(
                *PROBE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said, _ = await ran.communicate()
            assert ran.returncode == probe
            assert code is None or shown["health"]["why"] in said.decode()


@pytest.mark.parametrize("body", ["500 Internal Server Error", "[]", '{"code": "ours"}', "[" * 100_000])
async def test_a_probe_of_a_daemon_that_fails_says_so_in_a_sentence(tmp_path: Path, body: str):
    async def fails(request: web.Request) -> web.Response:
        return web.Response(status=500, text=body)

    failing = web.Application()
    failing.router.add_get("/readyz", fails)
    with closing(DataDirectory(tmp_path / "node")) as home:
        async with open_listener("127.0.0.1:0", home, b"run", "x") as door:
            await door.show(failing)
            ran = await asyncio.create_subprocess_exec(
                *PROBE, env={**os.environ, "DILOCOX_HOME": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said, _ = await ran.communicate()
    assert ran.returncode == 1
    assert said.decode() == "it answers with 500 and no reason: read its log\n"


async def test_who_asks_a_daemon_that_waits_hears_what_for(tmp_path: Path):
    with closing(DataDirectory(tmp_path)) as home:
        home.announce(role="node", port=7400, dht_port=7401)
        async with open_listener("127.0.0.1:0", home, b"run", "attic") as door, aiohttp.ClientSession() as session:
            facts = running_daemon(tmp_path)
            assert facts is not None
            assert (facts["role"], facts["api"], facts["port"], facts["name"]) == ("waiting", door.url, 7400, "attic")
            door.show_wait("waiting for the coordinator at nowhere:1", "check the link")
            async with session.get(f"{door.url}/v1/status") as answer:
                value = await answer.json()
            assert (value["state"], value["why"], value["health"]["well"]) == (
                "starting",
                "waiting for the coordinator at nowhere:1",
                None,
            )
            assert ("help", "check the link") in status_rows(value)
            for path in ("/v1/rounds", "/v1/rounds/3", "/v1/events", "/readyz"):
                async with session.get(door.url + path) as answer:
                    assert answer.status == 503
                    assert "waiting for the coordinator at nowhere:1" in (await answer.json())["title"]
            async with session.post(f"{door.url}/v1/pause") as answer:
                assert answer.status == 503
            async with session.get(f"{door.url}/livez") as answer:
                assert answer.status == 200
            async with door.no_room("disk full: waiting"):
                async with session.get(f"{door.url}/v1/status") as answer:
                    value = await answer.json()
                assert (value["state"], value["why"], value["health"]["well"]) == ("no-room", "disk full: waiting", False)
            async with session.get(f"{door.url}/v1/status") as answer:
                assert (await answer.json())["why"] == "it is restarting"


async def test_a_daemon_is_asked_by_its_address_too():
    """Ask by address, as for a daemon in a container, whose folder is elsewhere."""
    door = ApiListener("127.0.0.1:0")
    await door.wait("for its coordinator", "check the link")

    async def run(words: list[str]) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, words)

    told = await run(["status", "--home", door.url])
    assert told.exit_code == 0
    assert "for its coordinator" in told.output
    told = await run(["status", "--check", "--home", f"{door.url}/"])
    assert told.exit_code == 4
    for verb in (["rounds"], ["events"], ["peers", "--stages"], ["rounds", "1", "--why"], ["peers"]):
        told = await run([*verb, "--home", door.url])
        assert told.exit_code == 3, told.output
    await door.close()
    assert (await run(["status", "--home", door.url])).exit_code == 3, "nobody answers there any more"


async def test_nobody_is_refused_while_another_takes_over():
    door = ApiListener("localhost:0")
    await door.wait("it starts")

    async def told() -> dict[str, Any]:
        return {**NODE, "answers": answers(NODE, True)}

    async with aiohttp.ClientSession() as session:
        for turn in range(6):
            await (door.show(create_app(CollectorRegistry(), told)) if turn % 2 else door.wait("for it"))
            async with session.get(f"{door.url}/v1/status") as answer:
                assert (await answer.json())["role"] == ("node" if turn % 2 else "waiting")
    await door.close()


def test_a_taken_port_is_a_sentence():
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        with pytest.raises(PortError, match=r": Address already in use.*--api"):
            ApiListener(f"127.0.0.1:{squatter.getsockname()[1]}")
    with pytest.raises(PortError, match="--api"):
        ApiListener("192.0.2.1:0")
    with pytest.raises(PortError, match="--api"):
        ApiListener("no.such.host.invalid:0")


async def test_the_page_is_there_from_the_start_and_becomes_the_daemon_s(tmp_path: Path):
    door = ApiListener("127.0.0.1:0")
    await door.wait("waiting for the coordinator at nowhere:1", "check the link")
    try:
        async with browser(tmp_path / "browser", door.url + "/") as tab:
            await tab.wait("document.getElementById('state')?.textContent === 'waiting for the coordinator at nowhere:1'")
            assert await tab.evaluate("document.getElementById('well').textContent") == "check the link"
            assert await tab.evaluate("document.querySelector('main').hidden")
            door.show_wait("reading the chain")
            await tab.wait("document.getElementById('state').textContent === 'reading the chain'")
            assert not [error for error in tab.errors if "favicon" not in error]
    finally:
        await door.close()


@pytest.mark.parametrize(("answer", "sample"), [(True, 1.0), (False, 0.0), (None, None)])
async def test_well_is_what_readyz_says(answer: bool | None, sample: float | None):
    async def status() -> dict:
        return {"answers": [{"question": "Counted?", "answer": answer, "says": "", "do": "", "decides": True}]}

    registry = CollectorRegistry()
    async with TestClient(TestServer(create_app(registry, status))) as client:
        told = {each.name: each for each in text_string_to_metric_families(await (await client.get("/metrics")).text())}
        found = told["dilocox_well"].samples[0].value if "dilocox_well" in told else None
        assert (found, (await client.get("/readyz")).status) == (sample, 200 if answer else 503)
