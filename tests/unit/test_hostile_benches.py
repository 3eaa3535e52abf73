"""Tests of the benches of unknown peers: their inputs repeat, they find planted faults, they continue from stored results."""

import asyncio
import socket
from multiprocessing import Value
from pathlib import Path

import pytest

from bench import calls, fuzz, hostile, strangers
from bench.fuzz import CHUNKS, Chunk, Progress, plan, run_chunk, spoilt
from bench.mutation import Mutator
from bench.parsers import RUN, Target, targets
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import PATIENCE_SECONDS, Table, until
from tests.peers import meeting

EACH = 6
FROM = Value("q", 0, lock=False)


@pytest.fixture
def rows(tmp_path: Path) -> list[Target]:
    return targets(tmp_path)


def test_every_parser_takes_what_it_is_for_and_survives_what_is_not(rows: list[Target]):
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        for raw in row.corpus:
            row.call(raw)
        outcome = run_chunk(row, Chunk(row.name, 0, EACH), 7, FROM)
        assert outcome.findings == {}, row.name
        assert outcome.inputs == EACH


def planted(raw: bytes) -> None:
    if len(raw) > 20:
        raise AssertionError("longer than it may be")
    if b"\xff" in raw:
        raise KeyError(raw)
    if raw != b"an input":
        raise RemoteError(pb.REASON_MALFORMED, "not it")


def test_what_is_planted_is_found_and_can_be_given_again():
    target = Target("planted", [b"an input"], planted)
    outcome = run_chunk(target, Chunk("planted", 100, 1000), 1, FROM)
    assert len(outcome.findings) == 2
    for what, (number, count) in outcome.findings.items():
        assert count > 0
        with pytest.raises(AssertionError if what.startswith("Assertion") else KeyError):
            planted(spoilt(Mutator(0), target, 1, number))
    assert 0 < outcome.accepted < 500


def test_the_plan_gives_everything_its_share_and_is_the_same_again(rows: list[Target], tmp_path: Path):
    chunks = plan(rows, 1_000_000)
    assert abs(sum(chunk.count for chunk in chunks) - 1_000_000) < 10_000
    assert chunks == plan(rows, 1_000_000)
    assert len(chunks) == CHUNKS * len(rows)
    progress = Progress(tmp_path / "p" / "progress.json")
    progress.keep("good", {"findings": {}})
    progress.keep("bad", {"findings": {"it": [1, 1]}})
    again = Progress(tmp_path / "p" / "progress.json")
    assert (again.sound("good"), again.sound("bad"), again.sound("never")) == (True, False, False)


def test_a_bar_that_is_missed_is_a_sentence():
    line = {"target": "t", "inputs": 10, "growth": 0, "findings": {}}
    assert fuzz.missed([line], 10) == []
    assert fuzz.missed([{**line, "growth": 1 << 30}], 10) == ["t: 1024 MiB more"]
    assert fuzz.missed([{**line, "findings": {"t:1: it": 3}}], 100) == ["3 × t:1: it", "10 inputs; wanted are 100"]
    held = {"flood": "calls", "calls_answered": 1.0, "requests_answered": 1.0, "calls_median": 0.002, "requests_median": 0.002}
    held |= {"growth": 1 << 20, "left": 0, "most_growth": 50 << 20, "most_left": 20 << 20}
    result = {
        "with": [1.0, 1.2],
        "without": [1.0, 1.1],
        "processes": {"coordinator": {"before": 0, "peak": 1}},
        "floods": [held],
    }
    assert strangers.missed(result) == []
    slow = {**held, "calls_answered": 0.9, "requests_median": 0.5, "growth": 1 << 30, "left": 1 << 30}
    worse = {"with": [2.0], "without": [1.0], "processes": {"coordinator": {"before": 0, "peak": 1 << 30}}, "floods": [slow]}
    assert len(strangers.missed(worse)) == 6


async def test_calls_leave_the_round_as_it_was(tmp_path: Path):
    async with calls.Servers.open(tmp_path) as servers, asyncio.timeout(PATIENCE_SECONDS):
        client = calls.Client(3, servers.coordinator, servers.peer)
        tally = await client.chunk(0, 60)
        await client.close()
        assert tally.findings == {}
        assert sum(codes.total() for codes in tally.codes.values()) == 60
        assert await servers.look() == []


async def test_the_hostile_come_and_the_peer_goes_on_answering(tmp_path: Path):
    async with meeting(tmp_path, RUN, Table(RUN).genesis().commits) as (peer,), asyncio.timeout(PATIENCE_SECONDS):
        blob = peer.store.put([bytes(1 << 20)])
        attack = hostile.Attack(RUN.run_id, [peer.record, peer.record], blob, 1)
        tasks = await attack.start(10)
        while sum(attack.counts[f"{name}, times"] for name in ("idle", "half a handshake", "slow", "stream", "talk")) < 10:
            await asyncio.sleep(0)
        await peer.exchange.downloader.fetch(blob, [])
        assert not any(task.done() for task in tasks)
        await attack.end(tasks)


@pytest.mark.parametrize("turns", range(5))
async def test_nothing_stays_open_of_who_was_let_in_at_the_end(turns: int):
    with socket.create_server(("127.0.0.1", 0)) as server:
        record = pb.PeerRecord(address=f"127.0.0.1:{server.getsockname()[1]}")
        attack = hostile.Attack(RUN.run_id, [record], bytes(32), 1)
        attack.relay(record)
        with socket.create_connection(attack.relays[record.address].getsockname()) as stranger:
            for _ in range(turns):
                await asyncio.sleep(0)
            await attack.end([])
            await until(lambda: _is_closed(stranger))


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except BlockingIOError:
        return False
