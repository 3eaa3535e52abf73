"""`python -m bench.standby`: cost of a log in a store that coordinators share. `--check` fails if 1,000 inputs cost a
second.

One member of a real etcd runs on this machine's disk (Debian: etcd-server). Inputs come singly, each waited for, and 50
at a time, as from callers of a coordinator. Then the bench measures how long another coordinator takes to lead after
the lease expires.
"""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import bench_parser
from dilocox.coordinator.driver import RoundDriver, clock
from dilocox.coordinator.kv_store import StoreError
from dilocox.coordinator.round_log import RoundLog
from dilocox.coordinator.shared_log import Candidate, SharedLog
from dilocox.protocol.rounds import round_machine
from dilocox.transport.store.chain_file import ChainFile
from dilocox_etcd.client import Etcd, parse_store
from tests.helpers import COORDINATOR, Table, identity, manifest

RUN = manifest(rounds={"count": 3})
AT_ONCE = 50
MOST_SECONDS = 1.0
POLL_SECONDS = 0.1


async def measure(chain: ChainFile, log: RoundLog | None, count: int) -> float:
    """Return the seconds for `count` inputs of a coordinator's driver, each waited for by its caller. None: beside the
    chain."""
    driver, slots = RoundDriver(COORDINATOR, chain, lambda sent: None, clock, log), asyncio.Semaphore(AT_ONCE)
    table = Table(RUN)
    for number in range(2):  # too few to begin
        driver.feed(round_machine.Received(table.claim(number)))
    name = identity(0).peer

    async def one(number: int) -> None:
        async with slots:
            driver.feed(round_machine.Present(name) if number % 2 else round_machine.Absent(name))
            await driver.flush()

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - began


def office(folder: Path, number: int, at: str) -> tuple[Etcd, SharedLog, ChainFile]:
    store, chain = Etcd(parse_store(f"etcd://{at}/bench")), ChainFile(folder / f"{number}.db", RUN)
    me = Candidate(f"office {number}", f"127.0.0.1:{number + 1}", bytes([number] * 32).hex())
    return store, SharedLog(store, "bench", chain, me, clock), chain


async def bench(folder: Path, at: str, count: int) -> float:
    beside = await measure(ChainFile(folder / "beside.db", RUN), None, count)
    (first, one, chain), (second, two, _) = office(folder, 0, at), office(folder, 1, at)
    for log in (one, two):
        await log.enter()
    while not await stood(one):
        await asyncio.sleep(POLL_SECONDS)
    keeping = asyncio.create_task(one.keep_office())
    shared = await measure(chain, one, count)
    keeping.cancel()
    began = time.perf_counter()
    while not await stood(two):
        await asyncio.sleep(POLL_SECONDS)
    took = time.perf_counter() - began
    print(f"{'log':<10} {'inputs':>7} {'seconds':>8} {'seconds for 1,000':>18}")
    for name, seconds in (("beside", beside), ("etcd", shared)):
        print(f"{name:<10} {count:>7,} {seconds:>8.3f} {1000 * seconds / count:>18.3f}")
    print(f"another leads {took:.1f} s after the last that the lease's holder said")
    for store in (first, second):
        await store.close()
    return shared * 1000 / count


async def stood(log: SharedLog) -> bool:
    try:
        return await log.stand()
    except StoreError:
        return False


def main() -> None:
    arguments = bench_parser("bench.standby", __doc__, "500 inputs").parse_args()
    if (binary := shutil.which("etcd")) is None:
        sys.exit("no etcd on this machine (Debian: apt-get install etcd-server)")
    with tempfile.TemporaryDirectory(prefix="bench-standby-") as folder, socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (one, two)]
        one.close()
        two.close()
        client, peer = (f"http://127.0.0.1:{port}" for port in ports)
        command = [binary, "--data-dir", f"{folder}/etcd", "--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        member = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            seconds = asyncio.run(bench(Path(folder), f"127.0.0.1:{ports[0]}", 500 if arguments.quick else 2000))
        finally:
            member.kill()
            member.wait()
    if arguments.check and seconds > MOST_SECONDS:
        sys.exit(f"1,000 inputs cost {seconds:.2f} s, more than {MOST_SECONDS} s")


if __name__ == "__main__":
    main()
