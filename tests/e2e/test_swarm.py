"""Real processes: what a swarm survives. The tests share one swarm and run in order."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dilocox.node.workers.environment import WORKER
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.testnet.swarm import Member
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.files import find_chains
from dilocox.views import json_schema
from tests.e2e.conftest import PATIENCE_SECONDS, Swarm, late_member, listeners, names, wait_for, wait_until_gone
from tests.e2e.hostile import HostilePeer
from tests.helpers import digest, told_fields

pytestmark = pytest.mark.e2e

NODES = ("node-1", "node-2", "node-3")


def command(*arguments: str) -> Any:
    """Run `dilocox … --json`."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", *arguments, "--json"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return json.loads(result.stdout)


def test_rounds_close_with_everybody_and_one_state(swarm: Swarm):
    swarm.wait_for_round(3)
    swarm.wait_until_all_are_counted(NODES, 1)
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all nodes reported one state")
    rows = swarm.rounds()
    assert rows[0]["state"] != rows[3]["state"]
    assert all(row["evaluation_loss"] for row in rows[2:4])


def test_the_command_line_reads_a_running_node(swarm: Swarm):
    home = str(swarm.testnet.member("node-1").home)
    status = wait_for(lambda: said if (said := command("status", "--home", home))["on_roster"] else None, "it is on the roster")
    assert status["peer"] == swarm.peer("node-1")
    assert status["run"]["name"] == "e2e"

    def everybody() -> list[dict[str, Any]] | None:
        rows = command("peers", "--home", home)
        return rows if len(rows) == 3 and all(row["on_roster"] for row in rows) else None

    peers = wait_for(everybody, "three peers known, and on the roster")
    assert {row["name"] for row in peers} <= {*NODES}
    assert all(row["stages"] == [0, 1, 2] for row in peers)
    wait_for(
        lambda: [row["replicas"] for row in command("peers", "--stages", "--home", home)] == [3, 3, 3], "each stage has three"
    )
    rounds = command("rounds", "--home", home)
    assert [row["round"] for row in rounds] == list(range(len(rounds)))
    number = swarm.wait_until_all_are_counted(NODES, 1)
    wait_for(lambda: len(swarm.rounds("node-1")) > number, "node-1 has that round")
    assert command("rounds", str(number), "--home", home)["counted"] == 3
    missing = subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", "rounds", "99999", "--home", home], capture_output=True
    )
    assert missing.returncode == 2
    nowhere = subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", "status", "--home", "/nonexistent"], capture_output=True
    )
    assert nowhere.returncode == 3


def test_who_has_the_link_hears_whether_its_machine_fits_and_can_be_dialled(swarm: Swarm, tmp_path: Path):
    home = str(tmp_path / "home")
    found = {one["about"]: one for one in command("check", f"@{swarm.testnet.folder / 'link'}", "--home", home)["findings"]}
    for about in ("coordinator", "clock", "admission", "reachable", "devices", "memory", "disk", "port"):
        assert found[about]["level"] == "fine", found[about]
    told = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "dilocox.cli.main",
            "check",
            f"@{swarm.testnet.folder / 'link'}",
            "--home",
            home,
            "--host",
            "192.0.2.1",
        ],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, "who cannot be dialled takes part all the same"
    assert "its record names 192.0.2.1" in told.stdout
    link, me = f"@{swarm.testnet.folder / 'link'}", load_identity(Path(home) / "identity.key").peer
    told = subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", "check", link, "--home", home, "--as", "relay"],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 5, "the run names another holder, or none"
    assert me in told.stdout.replace("\n", "")


@pytest.mark.parametrize("name", ["node-1", "coordinator"])
def test_a_daemon_listens_on_its_two_ports_and_loopback_only(swarm: Swarm, name: str):
    facts = swarm.testnet.member(name).facts()
    assert facts is not None
    open_to_others = {(kind, port) for process in swarm.processes(name) for kind, port in listeners(process)}
    assert open_to_others == {("tcp", facts["port"]), ("tcp", facts["dht_port"])}


def test_metrics_and_health(swarm: Swarm):
    facts = swarm.testnet.member("node-1").facts()
    assert facts is not None
    wait_for(lambda: swarm.status("node-1").get("health", {}).get("well"), "it is counted, and in sync")
    for path, expected in (("/livez", b"ok"), ("/readyz", b"ok"), ("/metrics", b"dilocox_round_current ")):
        with urllib.request.urlopen(facts["api"] + path, timeout=PATIENCE_SECONDS) as response:
            assert expected in response.read()


@pytest.mark.parametrize("name", ["node-1", "coordinator"])
def test_the_page_events_and_explanations_of_both_roles(swarm: Swarm, name: str):
    swarm.wait_for_round(2)
    facts = swarm.testnet.member(name).facts()
    assert facts is not None

    def get(path: str) -> str:
        with urllib.request.urlopen(facts["api"] + path, timeout=PATIENCE_SECONDS) as response:
            return str(response.read().decode())

    assert swarm.status(name)["name"] == name
    told = {key for role in ("node-1", "coordinator") for key in swarm.status(role)}
    for role, known in (("node-1", json_schema.NODE), ("coordinator", json_schema.COORDINATOR)):
        told_fields(known, json_schema.fields_of(swarm.status(role)))
    page = get("/")
    assert set(re.findall(r"status\.([a-z_]+)", page)) <= told, "the page asks for what the daemons tell"
    seen = [json.loads(line[6:]) for line in get("/v1/events?follow=no").splitlines() if line.startswith("data: ")]
    assert [event["id"] for event in seen] == list(range(1, len(seen) + 1))
    assert {"node-1": "commit-applied", "coordinator": "ballot-opened"}[name] in {event["event"] for event in seen}
    explained = json.loads(get("/v1/explain/1"))
    assert {"time", "counted"} <= {row["about"] for row in explained["findings"]}
    assert ("this node" in {row["about"] for row in explained["findings"]}) == (name == "node-1")


def test_a_late_joiner_is_counted_within_three_rounds_with_the_same_state(swarm: Swarm):
    swarm.wait_for_round(5)  # past a snapshot, so that the state is fetched
    late = late_member(swarm)
    swarm.testnet.start(late)
    wait_for(lambda: "warming up" in swarm.log(late.name), "the late joiner has the state")
    joined_at = swarm.open_round()
    assert swarm.wait_until_counted(late.name, joined_at) <= joined_at + 3
    wait_for(lambda: swarm.same_states(swarm.open_round()), "the late joiner has the others' state")
    assert "snapshot of round" in swarm.log(late.name)


def test_killing_a_node_costs_no_round_and_it_resumes(swarm: Swarm):
    victim = "node-2"
    processes = swarm.processes(victim)
    assert len(processes) >= 5  # daemon, DHT child, libp2p, two workers
    before = swarm.open_round()
    swarm.testnet.kill(swarm.testnet.member(victim))
    wait_until_gone(processes)
    swarm.wait_for_round(before + 2)
    for number in range(before + 1, before + 3):
        gone = swarm.peer(victim) in {item["peer"] for item in swarm.round(number)["excluded"]}
        assert swarm.counted(number)
        assert swarm.counted_or_busy(number) >= 2 + gone
    swarm.testnet.start(swarm.testnet.member(victim))
    swarm.wait_until_counted(victim, swarm.open_round())
    wait_for(lambda: swarm.same_states(swarm.open_round()), "the restarted node has the others' state")


def test_a_node_whose_caches_are_damaged_heals_them(swarm: Swarm):
    victim = swarm.testnet.member("node-2")
    processes = swarm.processes(victim.name)
    swarm.testnet.kill(victim)
    wait_until_gone(processes)
    (folder,) = (victim.home / "runs").iterdir()
    chain = folder / "chain.db"
    own = folder / "own.db"
    for database in (chain, own):
        database.with_name(database.name + "-wal").unlink()  # what SQLite would mend it with
        database.write_bytes(b"garbage" * 100)
    for blob in folder.glob("blobs/" + "?" * 64):
        blob.write_bytes(blob.read_bytes()[:-1] + b"\x7f")
    for shard in victim.home.glob("data/" + "?" * 64):
        shard.write_bytes(shard.read_bytes()[:-1])
    damaged = [chain, own, folder / "peers.json", victim.home / "daemon.json", victim.home / "tls.pem"]
    for path in damaged[2:]:
        path.write_bytes(b"garbage")
    swarm.testnet.start(victim)
    swarm.wait_until_counted(victim.name, swarm.open_round())
    wait_for(lambda: swarm.same_states(swarm.open_round()), "the healed node has the others' state")
    assert all(path.with_name(path.name + ".bad").exists() for path in damaged)


@pytest.mark.parametrize("word", [WORKER, "p2pd", pytest.param("dht_child", marks=pytest.mark.thorough)])
def test_killing_any_one_process_of_a_node_leaves_it_whole(swarm: Swarm, word: str):
    victim = "node-3"
    whole = {WORKER: 2, "dht_child": 1, "p2pd": 1}
    wait_for(lambda: swarm.roles(victim, whole) == whole, f"{victim} has all its processes")
    process = swarm.process(victim, word)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    wait_for(lambda: swarm.roles(victim, whole) == whole, f"{victim} has all its processes again after {word} was killed")
    swarm.wait_until_counted(victim, swarm.open_round())


def test_killing_the_coordinator_stops_no_training_and_leaves_no_gap(swarm: Swarm):
    before = swarm.open_round()
    processes = swarm.processes("coordinator")
    swarm.testnet.kill(swarm.testnet.coordinator)
    wait_until_gone(processes)
    step = swarm.status("node-1")["inner_step"]
    wait_for(lambda: swarm.status("node-1")["inner_step"] > step, "training went on")
    swarm.testnet.start(swarm.testnet.coordinator)
    swarm.wait_for_round(before + 2)
    assert [row["round"] for row in swarm.rounds()][: before + 2] == list(range(before + 2))
    assert swarm.counted(before + 2)
    assert swarm.counted_or_busy(before + 2) >= 2


ROTS = 10
"""Largest number of flipped bits: a replaced state may still be in memory, and damage there has no effect."""


def test_a_bit_that_rots_in_memory_is_found_by_replay_and_mended(swarm: Swarm):
    victim = "node-1"

    def noticed() -> bool:
        return "differs from the run's" in swarm.log(victim)

    def noticed_by(number: int) -> bool:
        return noticed() or swarm.open_round() >= number

    for _ in range(ROTS):
        wait_for(partial(rot, swarm, victim), "the state lies in the memory of workers")
        after = swarm.open_round() + 3
        wait_for(partial(noticed_by, after), "the next rounds close")
        if noticed():
            break
    else:
        pytest.fail(f"after {ROTS} bits no divergence was noticed")
    swarm.wait_until_counted(victim, swarm.open_round())
    wait_for(lambda: swarm.same_states(swarm.open_round()), "the node has the others' state again")


def rot(swarm: Swarm, victim: str) -> int:
    """Flip a bit in every copy of Θ in the memory of the node's workers; return the number of copies. 0: workers start, or
    are replaced."""
    blobs = next((swarm.testnet.member(victim).home / "runs").iterdir()) / "blobs"
    workers = [p for p in swarm.processes(victim) if names(p, WORKER)]
    try:
        for process in workers:
            process.suspend()
        states = [state for path in blobs.glob("?" * 64) if len(state := read_if_there(path)) > 50_000]
        patterns = {state[4096:4160] for state in states}  # inside Θ
        return sum(flip(process.pid, patterns) for process in workers)
    except PermissionError as error:
        pytest.skip(f"this machine does not let a test write to its child's memory: {error}")
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return 0
    finally:
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def read_if_there(path: Path) -> bytes:
    """Read a file, if it is there: the daemon continues to delete blobs without a use."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def flip(pid: int, patterns: set[bytes]) -> int:
    """Flip a bit at each match of a pattern in the process's writable private memory; return how many were found.

    The memory is read once. During the read the process is suspended, and its daemon gives it up after half a minute.
    """
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb+", buffering=0) as memory:
        for line in maps:
            span, flags, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if not flags.startswith("rw-p"):
                continue
            try:
                memory.seek(start)
                region = memory.read(end - start)
            except OSError:
                continue
            for pattern in patterns:
                if (at := region.find(pattern)) >= 0:
                    memory.seek(start + at + 2)  # the sign or exponent of a float32: a difference that no rounding hides
                    memory.write(bytes([pattern[2] ^ 0x40]))
                    found += 1
    return found


def test_hostile_peers_are_excluded_with_their_reasons(swarm: Swarm, tmp_path: Path):
    link = JoinLink.parse((swarm.testnet.folder / "link").read_text())

    def junk(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        peer.serve(leaves, 1, b"\x00" * leaves.leaves[1].size, leaves.leaves[1].norms)

    def not_finite(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        raw = bytearray(peer.payload(0)[0])
        raw[40 + 12 * len(peer.layouts(0)) + 8] = 127  # HEADS' first byte: the first base exponent
        peer.serve(leaves, 0, bytes(raw), leaves.leaves[0].norms)

    def understated(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        leaves.leaves[0].norms = bytes(code - 25 for code in leaves.leaves[0].norms)

    def copied(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        peer.serve(leaves, 0, *peer.payload(0, of=swarm.peer("node-1")))

    def contradicting(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        body.norm = 200

    def short(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        peer.serve(leaves, 0, peer.payload(0)[0][:-1], leaves.leaves[0].norms)

    def nowhere(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        leaves.leaves[0].digest = digest("nobody has this")

    def elsewhere(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        body.base_state = digest("another state")

    def unlisted(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        del leaves.leaves[2]

    stories = [
        (junk, pb.REASON_MALFORMED),
        (not_finite, pb.REASON_NON_FINITE),
        (understated, pb.REASON_NORM_MISMATCH),
        (copied, pb.REASON_COPIED),
        (contradicting, pb.REASON_NORM_MISMATCH),
        (short, pb.REASON_SIZE_MISMATCH),
        (nowhere, pb.REASON_UNAVAILABLE),
        (elsewhere, pb.REASON_WRONG_BASE),
        (unlisted, pb.REASON_WRONG_STAGES),
    ]

    async def story() -> list[tuple[int, str]]:
        results = []
        for first in range(0, len(stories), 2):  # a node that missed two commits would have to rest
            async with HostilePeer(link, tmp_path / f"mallory-{first}") as mallory:
                for spoil, _ in stories[first : first + 2]:
                    number = await asyncio.wait_for(mallory.judged(spoil), PATIENCE_SECONDS)
                    results.append((number, mallory.identity.peer))
        return results

    running = {m.name: m.facts() for m in swarm.testnet.members}
    for (number, peer), (spoil, reason) in zip(asyncio.run(story()), stories, strict=True):
        detail = swarm.round(number)
        reasons = [item["reason"] for item in detail["excluded"] if item["peer"] == peer]
        assert reasons == [pb.Reason.Name(reason).removeprefix("REASON_").lower().replace("_", "-")], spoil.__name__
        assert detail["counted"] >= 2
        assert peer not in {item["cluster"] for item in detail["clusters"]}
    assert {m.name: m.facts() for m in swarm.testnet.members} == running, "a process died of it"


def test_a_loud_payload_counts_by_no_more_than_twice_the_median(swarm: Swarm, tmp_path: Path):
    link = JoinLink.parse((swarm.testnet.folder / "link").read_text())

    def loud(peer: HostilePeer, body: pb.Contribution, leaves: pb.Leaves) -> None:
        peer.serve(leaves, 2, *peer.payload(2, scale=100.0))

    async def story() -> tuple[int, str]:
        async with HostilePeer(link, tmp_path / "loud") as mallory:
            number = await asyncio.wait_for(mallory.judged(loud), PATIENCE_SECONDS)
            return number, mallory.identity.peer

    number, peer = asyncio.run(story())
    detail = swarm.round(number)
    counted = next(item for item in detail["clusters"] if item["cluster"] == peer)
    assert counted["clipped"] < 0.5, "`largest_rms` bounds it, the clip does the rest"
    assert counted["norm"] * counted["clipped"] <= 2.2 * detail["median_norm"]


def test_a_node_that_nobody_can_dial_is_counted_by_what_others_keep(swarm: Swarm):
    late = late_member(swarm)
    processes = swarm.processes(late.name)
    swarm.testnet.kill(late, signal.SIGTERM)
    wait_until_gone(processes)
    reachable = list(late.arguments)
    late.arguments.extend(["--host", "192.0.2.1"])  # an address of another machine
    swarm.testnet.start(late)
    try:
        wait_for(lambda: swarm.status(late.name).get("reachable") is False, "it heard that nobody can dial it")
        me = swarm.peer(late.name)

        def kept() -> list[str] | None:
            """Return the members that store their contribution to the last round that counted it."""
            last = swarm.open_round()
            clusters = [item for n in range(max(0, last - 3), last) for item in swarm.round(n)["clusters"]]
            return next((item["kept_by"] for item in reversed(clusters) if item["cluster"] == me and item["kept_by"]), None)

        keepers = wait_for(kept, "it was counted, and others keep its payloads")
        assert set(keepers) <= {swarm.peer(m.name) for m in swarm.testnet.nodes if m is not late}
        assert command("status", "--home", str(late.home))["reach"].startswith("not reachable")
    finally:
        processes = swarm.processes(late.name)
        swarm.testnet.kill(late, signal.SIGTERM)
        wait_until_gone(processes)
        late.arguments[:] = reachable
        swarm.testnet.start(late)
        wait_for(lambda: swarm.status(late.name).get("reachable"), "it can be dialled again")


@contextlib.contextmanager
def on_a_small_disk(folder: Path) -> Iterator[None]:
    """Mount the folder with its content on a small separate disk inside the block."""
    aside = folder.with_name(f"{folder.name}.aside")

    def move(source: Path, target: Path) -> None:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "parent-*"))

    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "disk", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        try:
            move(folder, aside)
        finally:  # also if a daemon still writes there
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)
        aside.rename(folder)


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which only root may")
def test_a_full_disk_is_waited_for_and_costs_no_seat(swarm: Swarm):
    late = late_member(swarm)

    def stop() -> None:
        processes = swarm.processes(late.name)
        swarm.testnet.kill(late, signal.SIGTERM)
        wait_until_gone(processes)

    if late.facts() is not None:
        stop()
    shutil.rmtree(late.home, ignore_errors=True)  # the member starts again with a new identity
    late.home.mkdir()
    with on_a_small_disk(late.home):
        swarm.testnet.start(late)
        wait_for(late.facts, "it runs")
        swarm.wait_until_counted(late.name, swarm.open_round())
        before = late.facts()
        filler = late.home / "filler"

        def fill() -> dict[str, Any] | None:
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            status = swarm.status(late.name)
            return status if status.get("role") == "waiting" else None

        assert wait_for(fill, "it waits for room")["why"] == f"disk full: waiting for free space in {late.home}"
        since = swarm.open_round()
        filler.unlink()
        swarm.wait_until_counted(late.name, since)
        assert before is not None
        assert (late.facts() or {})["pid"] == before["pid"], "one process, all along"
        stop()
    swarm.testnet.start(late)
    wait_for(lambda: swarm.status(late.name).get("role") == "node", "it is back")


@pytest.mark.thorough
def test_who_pauses_costs_nobody_a_round_and_comes_back(swarm: Swarm):
    home, me = str(swarm.testnet.member("node-2").home), swarm.peer("node-2")
    swarm.wait_until_counted("node-2", swarm.open_round() - 1)
    before = swarm.open_round()
    assert "round" in command("pause", "--home", home)["says"]
    status = swarm.status("node-2")
    assert (status["state"], status["why"]) == ("paused", "until `dilocox resume`")
    wait_for(lambda: not swarm.roles("node-2", [WORKER])[WORKER], "its devices are free")
    first = swarm.wait_until_gone_from_roster("node-2", before)
    assert swarm.round(first)["counted"], "others trained on"
    swarm.wait_for_round(first + 2)
    assert swarm.status("node-2")["round"] > first, "it follows the chain"
    for number in range(first + 1, first + 3):
        assert me not in {item["peer"] for item in swarm.round(number)["excluded"]}, "nobody waited for it"
    assert "resumed" in command("resume", "--home", home)["says"]
    swarm.wait_until_counted("node-2", first + 3)
    assert swarm.status("node-2")["network"]["sent"]["blob"] > 0


def test_the_chain_verifies_and_a_round_replays(swarm: Swarm):
    for name in ("coordinator", "node-1"):
        home, closed = str(swarm.testnet.member(name).home), len(swarm.rounds(name))
        assert command("verify", "--home", home)[0]["commits"] >= closed
    member = swarm.testnet.member("node-1")

    def replay() -> bool:
        """Replay on a folder that does not change: while a node runs, rounds delete the files of a replay."""
        wait_for(member.facts, "node-1 runs")
        swarm.testnet.kill(member)
        try:
            newest = 1 + (swarm.open_round() - 3) // 4 * 4
            verify = ["verify", "--home", str(member.home), "--replay"]
            command = [sys.executable, "-P", "-m", "dilocox.cli.main", *verify]
            return any(
                subprocess.run([*command, str(round)], capture_output=True).returncode == 0 for round in (newest, newest - 4)
            )
        finally:
            swarm.testnet.start(member)

    wait_for(replay, "a round was replayed bit for bit")
    swarm.wait_until_counted("node-1", swarm.open_round())


def test_a_node_leaves_cleanly_on_sigterm(swarm: Swarm):
    late = late_member(swarm)
    processes = swarm.processes(late.name)
    before = swarm.open_round()
    swarm.testnet.kill(late, signal.SIGTERM)
    wait_until_gone(processes)
    assert swarm.testnet.processes[late.name].wait(timeout=PATIENCE_SECONDS) == 0
    swarm.wait_until_gone_from_roster(late.name, before)


def test_a_node_finishes_its_round_and_ends_when_told_to_leave(swarm: Swarm):
    home = str(swarm.testnet.member("node-3").home)
    swarm.wait_until_counted("node-3", swarm.open_round() - 1)
    processes, before = swarm.processes("node-3"), swarm.open_round()
    command("leave", "--home", home)
    wait_until_gone(processes)
    gone = swarm.wait_until_gone_from_roster("node-3", before)
    assert swarm.round(gone)["counted"]
    swarm.testnet.start(swarm.testnet.member("node-3"))
    swarm.wait_until_counted("node-3", gone)


def test_the_owner_gives_the_run_to_another_coordinator(swarm: Swarm):
    """Check an appointment after the first coordinator's machine is lost with its folder. All restart with a node's chain
    and the new link."""
    testnet, members = swarm.testnet, swarm.testnet.running()
    processes = [process for member in members for process in swarm.processes(member.name)]
    for member in members:
        testnet.kill(member)
    wait_until_gone(processes)
    folder, home, donor = testnet.folder, testnet.folder / "coordinator-2", testnet.member("node-1").home
    heir = load_identity(home / "identity.key").peer
    (path,) = find_chains(donor)
    with ChainFile.for_reading(path) as chain:
        before = chain.length
    appoint = [
        sys.executable,
        "-P",
        "-m",
        "dilocox.cli.main",
        "owner",
        "appoint",
        heir,
        str(folder / "run.toml"),
        "--home",
        str(donor),
    ]
    subprocess.run(appoint, check=True, timeout=PATIENCE_SECONDS)
    (folder / "link").unlink()
    arguments = ["coordinator", str(folder / "run.chain"), "--home", str(home), "--link-file", str(folder / "link")]
    testnet.members[0] = Member("coordinator", home, arguments)
    testnet.start(testnet.coordinator)
    wait_for((folder / "link").exists, "the new coordinator is there")
    for member in members[1:]:
        testnet.start(member)
    swarm.wait_for_round(before + 1)
    assert len(swarm.counted(before + 1)) >= 2
    wait_for(lambda: all(swarm.status(member.name) for member in members[1:]), "all of them are back")
    with ChainFile.for_reading(path) as chain:
        commits = list(chain.verify())
    assert [commit.peer == heir for commit in commits] == [number >= before for number in range(len(commits))]
