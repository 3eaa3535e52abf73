"""Tests of unknown peers' names, which are printed verbatim, and of the HTTP API, which answers no request by another host
name."""

import json

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from rich.text import Text

from dilocox.cli import common
from dilocox.cli.exit_codes import Exit
from dilocox.views.api_listener import ApiListener
from dilocox.views.http import create_app, json_response
from tests.helpers import no_status

NASTY = ["[/]", "[bold]x", "[link=http://evil]click[/link]", "a[/b]c", "[@click=app.bell]x[/]"]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_no_markup(name: str, capsys: pytest.CaptureFixture[str]):
    """Reproduce a fault: a peer named `[/]` crashed `dilocox peers`."""
    common.print_table(["name", "n"], [[name, "1"]])
    common.print_labelled("name", name, 9)
    common.errors.print(f"rejected {name}")
    said = capsys.readouterr()
    assert said.out.count(name) == 2
    assert name in said.err
    with pytest.raises(Exception) as leaving:  # noqa: PT011 - typer's Exit
        common.fail(f"no peer {name}", Exit.USAGE, f"not {name}")
    assert getattr(leaving.value, "exit_code", None) == 2
    assert capsys.readouterr().err.count(name) == 2


def test_what_others_wrote_moves_no_cursor(capsys: pytest.CaptureFixture[str]):
    """Check a coordinator's notes: they are in the commits that `dilocox rounds N` prints, and no peer can verify them."""
    common.print_table(["peer", "detail"], [["a", "\x1b[2J\nb"]])
    common.print_labelled("why", "\x1b]0;all is well\x07\nmore", 5)
    common.print_labelled("own", Text("a\nb"), 5)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["peer  detail", "a     ?[2J", "      b", "why  ?]0;all is well?", "more", "own  a", "b"]


@pytest.fixture
async def api():
    async def act(request: web.Request) -> web.Response:
        return json_response({"done": True})

    app = create_app(CollectorRegistry(), no_status)
    app.router.add_post("/v1/act", act)
    app.router.add_get("/v1/look", act)
    door = ApiListener("127.0.0.1:0")
    await door.show(app)
    yield door.url
    await door.close()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/look", {}, 200),
        ("/v1/look", {"Host": "localhost:80"}, 200),
        ("/v1/look", {"Host": "192.0.2.7:8080"}, 200),
        ("/v1/look", {"Host": "[::1]:8080"}, 200),
        ("/v1/look", {"Host": "evil.example"}, 403),
        ("/v1/look", {"Host": "127.0.0.1.evil.example"}, 403),
        ("/v1/look", {"Host": ""}, 403),
        ("/v1/look", {"Host": "[::1"}, 403),
        ("/v1/look", {"Host": "a]b"}, 403),
        ("/v1/look", {"Origin": "http://[evil"}, 403),
        ("/v1/look", {"Origin": "http://evil.example"}, 403),
        ("/v1/look", {"Origin": "null"}, 403),
        ("/livez", {"Host": "node-1"}, 200),
        ("/metrics", {"Host": "node-1"}, 200),
    ],
)
async def test_the_api_answers_for_its_own_address_only(api: str, path: str, headers: dict[str, str], status: int):
    async with aiohttp.ClientSession() as session, session.get(api + path, headers=headers) as response:
        assert response.status == status
        if status == 403:
            assert json.loads(await response.text())["code"].startswith("wrong-")


async def test_what_does_something_is_no_get(api: str):
    async with aiohttp.ClientSession() as session:
        async with session.get(api + "/v1/act") as response:
            assert response.status == 405
        async with session.post(api + "/v1/act") as response:
            assert response.status == 200
