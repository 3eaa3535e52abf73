"""`make docker-test`: test of the README's and compose.yaml's promises in real containers. It needs only Python and an
engine.

It builds the image, starts the swarm of compose.yaml, and waits until it trains. A fourth node joins as in the README,
and the test waits until a commit counts it. Then it checks logs, health and size, and removes everything that it
started. Without an engine it prints this and exits with 0. `BUILD_ARGS="NAME=VALUE …"` are passed to `docker build`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMAGE, FOURTH, PROJECT = "dilocox", "dilocox-fourth", "dilocox-test"
VOLUMES = ("dilocox_coordinator", "dilocox_link", "dilocox_node_1", "dilocox_node_2", "dilocox_node_3")
"""Volumes of compose.yaml, which an operator's swarm may use."""
COORDINATOR, JOINED = "http://127.0.0.1:7402", "http://127.0.0.1:7410"
LARGEST_BYTES = 1_600_000_000
TRAINS_SECONDS = 180
"""Seconds from `up` to the first counted round: compose.yaml's promise for two loaded cores."""
PATIENCE_SECONDS = 1800
"""A machine that needs longer is not tested by this."""
POLL_SECONDS = 2.0


def run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode:
        fail(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def fail(why: str) -> NoReturn:
    raise SystemExit(f"docker-test: {why}")


def say(what: str) -> None:
    sys.stdout.write(f"docker-test: {what}\n")
    sys.stdout.flush()


def get(url: str) -> Any:
    """Return the answer; None if there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)
    except (OSError, ValueError):
        return None


def wait_for(what: str, condition: Callable[[], Any]) -> tuple[Any, float]:
    """Return the condition's first true value, and the seconds until then."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        if found := condition():
            return found, time.monotonic() - began
        time.sleep(POLL_SECONDS)
    fail(f"{what}: not within {PATIENCE_SECONDS} s")


def lacking() -> str | None:
    """Return why the test cannot run here; None if it can."""
    if shutil.which("docker") is None:
        return "there is no docker on this machine"
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "no container engine answers on this machine (docker info)"
    if compose() is None:
        return "there is no docker compose on this machine"
    return None


def compose() -> list[str] | None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose", "-p", PROJECT]
    return ["docker-compose", "-p", PROJECT] if shutil.which("docker-compose") else None


def names(status: Any) -> bool:
    return isinstance(status, dict) and status.get("role") == "node"


def main() -> None:
    if (why := lacking()) is not None:
        say(f"skipped: {why}")
        return
    swarm = compose()
    assert swarm is not None, "nothing is lacking"
    there = [name for name in VOLUMES if name in run("docker", "volume", "ls", "-q").split()]
    if there:
        fail(f"a swarm of yours is here ({', '.join(there)}), which this would remove: `docker compose down -v` first")
    base = [f"--build-arg={word}" for word in os.environ.get("BUILD_ARGS", "").split()]
    say("building the image")
    run("docker", "build", "--network", "host", "-t", IMAGE, *base, ".")
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", IMAGE))
    say(f"the image has {size / 1e9:.2f} GB")
    if size > LARGEST_BYTES:
        fail(f"the image has {size:,} bytes, more than {LARGEST_BYTES:,}")
    try:
        look(swarm)
    finally:
        run("docker", "rm", "-f", "-v", FOURTH, check=False)
        run(*swarm, "down", "-v", check=False)
    say("all of it holds")


def look(swarm: list[str]) -> None:
    run(*swarm, "up", "-d")

    def counts() -> Any:
        return [row for row in get(f"{COORDINATOR}/v1/rounds") or [] if row["round"] and row["counted"]]

    rows, seconds = wait_for("the swarm trains", counts)
    say(f"round {rows[0]['round']} counted {rows[0]['counted']} of {rows[0]['roster']} after {seconds:.0f} s")
    if seconds > TRAINS_SECONDS:
        fail(f"promised are {TRAINS_SECONDS} s")
    run(
        *("docker", "run", "-d", "--name", FOURTH, "--hostname", FOURTH, "--network", "dilocox"),
        *("-v", "dilocox_link:/run/dilocox:ro", "-p", f"{JOINED.removeprefix('http://')}:7402", IMAGE),
        *(
            "node",
            "--join",
            "@/run/dilocox/link",
            "--name",
            FOURTH,
            "--host",
            FOURTH,
            "--threads",
            "1",
            "--api",
            "0.0.0.0:7402",
        ),
    )

    def counted() -> Any:
        status = get(f"{JOINED}/v1/status")
        return status if names(status) and status["counted"] and status["counted"][-1] else None

    _, seconds = wait_for("a fourth node is counted", counted)
    say(f"a fourth node joined and was counted after {seconds:.0f} s")
    said = run("docker", "exec", FOURTH, "dilocox", "status")
    if "counted" not in said:
        fail(f"`docker exec {FOURTH} dilocox status` says:\n{said}")
    say("`docker exec … dilocox status` says:\n" + said.rstrip())
    containers = [*run(*swarm, "ps", "-q").split(), FOURTH]
    for container in containers:
        log = run("docker", "logs", container)
        if "Traceback" in log or not log.strip():
            fail(f"the log of {container} has a traceback, or is empty:\n{log[-4000:]}")
        state = json.loads(run("docker", "inspect", "-f", "{{json .State}}", container))
        if state["Status"] != "running" or state.get("Health", {}).get("Status") == "unhealthy":
            fail(f"{container} is {state}")
    say(f"{len(containers)} containers run, none is unhealthy, and their logs have no traceback; the fourth's ends with")
    sys.stdout.write("\n".join(run("docker", "logs", FOURTH).splitlines()[-5:]) + "\n")


if __name__ == "__main__":
    main()
