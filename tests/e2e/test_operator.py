"""Real daemons as an operator sees them: a webhook, events as they come, metrics, hours of the day."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dilocox.node.workers.environment import WORKER
from tests.e2e.conftest import PATIENCE_SECONDS, Swarm, build, late_member, running, wait_for, wait_until_gone
from tests.helpers import HEARS_CTRL_C
from tests.receiver import Receiver, receiving
from tests.unit.test_metrics import OF_EVERY_DAEMON, OF_NODES

pytestmark = pytest.mark.e2e

CLI = [sys.executable, "-P", "-m", "dilocox.cli.main"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver
        assert not receiver.wrong


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Swarm]:
    """Run three nodes, of which one sends notices, and prepare a fourth that a test starts."""
    folder = tmp_path_factory.mktemp("operator")
    testnet = build(folder, count=100_000, nodes=4, options=["--devices", "1"])
    (folder / "hook").write_text(f"{receiver.url}/hook\n")
    testnet.member("node-2").arguments.extend(["--notify", f"@{folder / 'hook'}"])
    with running(testnet, rounds=2) as swarm:
        yield swarm


@pytest.mark.parametrize("name", ["node-1", "coordinator"])
def test_events_are_told_as_they_happen(swarm: Swarm, name: str):
    home = str(swarm.testnet.member(name).home)
    before = swarm.open_round()
    command = [*HEARS_CTRL_C, *CLI, "events", "-f", "--json", "--home", home]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        seen: list[int] = []
        for line in following.stdout:
            event = json.loads(line)
            seen.append(event["id"])
            if event["event"] in ("commit-applied", "round-closed") and event["round"] > before:
                break  # no member knew that round at the request
        following.send_signal(signal.SIGINT)
        following.wait(PATIENCE_SECONDS)
        rest, words = following.stdout.read(), following.stderr.read()  # `communicate` knows nothing of what was read ahead
    seen += [json.loads(line)["id"] for line in rest.splitlines() if line.endswith("}")]
    assert seen == sorted(set(seen))
    assert following.returncode == 130
    assert not words


@pytest.mark.parametrize(("name", "promised"), [("node-1", {**OF_EVERY_DAEMON, **OF_NODES}), ("coordinator", OF_EVERY_DAEMON)])
def test_daemons_have_the_metrics_that_are_promised(swarm: Swarm, name: str, promised: dict[str, set[str]]):
    facts = swarm.testnet.member(name).facts()
    assert facts is not None

    def ask() -> dict[str, set[str]]:
        with urllib.request.urlopen(f"{facts['api']}/metrics", timeout=PATIENCE_SECONDS) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [sample for family in families for sample in family.samples]
        assert not [sample for sample in samples if any("12D3" in value for value in sample.labels.values())]
        return {sample.name: set(sample.labels) for sample in samples}

    wait_for(lambda: promised.items() <= ask().items(), f"{name} tells all of {sorted(promised)}")


def test_who_was_not_counted_is_told_by_a_webhook(swarm: Swarm, receiver: Receiver):
    victim = swarm.testnet.member("node-2")
    peer, processes, before = swarm.peer("node-2"), swarm.processes("node-2"), swarm.open_round()
    swarm.testnet.kill(victim)
    wait_until_gone(processes)

    def missed() -> int | None:
        rounds = range(before, swarm.open_round())
        return next((n for n in rounds if peer in {item["peer"] for item in swarm.round(n)["excluded"]}), None)

    number = wait_for(missed, "a round closed without node-2")
    swarm.testnet.start(victim)

    def told() -> dict[str, Any] | None:
        mine = (each for each in receiver.notices if each["event"] == "not-counted" and each["round"] == number)
        return next(mine, None)

    notice = wait_for(told, "its next life told of that")
    assert (notice["peer"], notice["role"]) == (peer, "node")
    assert notice["text"].startswith(f"node-2: round {number}: this node was not counted: ")
    swarm.wait_until_counted("node-2", number + 1)


def restart(swarm: Swarm, hours: str) -> None:
    late = late_member(swarm)
    if late.facts() is not None:
        processes = swarm.processes(late.name)
        swarm.testnet.kill(late, signal.SIGTERM)
        wait_until_gone(processes)
        late.arguments[:] = late.arguments[:-2]
    late.arguments.extend(["--hours", hours])
    swarm.testnet.start(late)


def test_hours_of_the_day_are_kept(swarm: Swarm):
    """Check hours of the day by the wall clock, which a test cannot wait for: an hour half a day away, and then the whole
    day."""
    late, begins = late_member(swarm), datetime.now() + timedelta(hours=12)
    hours = f"{begins:%H:%M}-{begins + timedelta(hours=1):%H:%M}"
    restart(swarm, hours)
    status = wait_for(lambda: found if (found := swarm.status(late.name)).get("state") == "paused" else None, "it is paused")
    assert status["why"] == f"until {begins:%H:%M} (--hours {hours})"
    since = swarm.open_round()
    swarm.wait_for_round(since + 1)
    assert not [n for n in range(since, since + 2) if swarm.peer(late.name) in swarm.round(n)["next_roster"]]
    assert not swarm.roles(late.name, [WORKER])[WORKER], "its devices are others'"
    wait_for(lambda: tells_why(swarm, late.name, hours), "it says of the open round why it takes no part")
    restart(swarm, "0-24")
    swarm.wait_until_counted(late.name, swarm.open_round())


def tells_why(swarm: Swarm, name: str, hours: str) -> bool:
    """Return whether the open round's reason names the hours; the round may close before the request."""
    said = swarm.ask(name, f"/v1/explain/{swarm.open_round()}")
    return f"not on the roster; it is paused: until {hours[:5]} (--hours {hours})" in json.dumps(said)
