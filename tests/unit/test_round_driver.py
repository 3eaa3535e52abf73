"""The driver of the round machine over a log that hangs."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from dilocox.coordinator.driver import RoundDriver
from dilocox.coordinator.round_log import Committed, Entry, LogItem
from dilocox.protocol.events import Event
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.round_machine import Differ, Moment, Received, Tick
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.chain_file import ChainFile
from tests.helpers import COORDINATOR, Table, manifest

RUN = manifest()


class HangingLog:
    """A log whose writes wait while `open` is not set."""

    healed = False

    def __init__(self, chain: ChainFile) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self._chain = chain

    def replay(self) -> Iterable[Entry]:
        return ()

    async def write(self, batch: Sequence[LogItem]) -> None:
        await self.open.wait()
        for item in batch:
            if isinstance(item, Committed):
                self._chain.append(item.commit.envelope)


async def test_no_deadline_passes_while_a_write_holds_up_what_leaves(tmp_path: Path):
    """Reproduce a fault: a round closed without votes as soon as its ballot was sent, so voters never received it in time."""
    table, chain = Table(RUN).genesis(), ChainFile(tmp_path / "chain.db", RUN)
    chain.append(table.commits[0].envelope)
    now, sent, log = 5000.0, list[Statement[object] | Differ](), HangingLog(chain)

    def emit(event: Event) -> None: ...

    driver = RoundDriver(COORDINATOR, chain, sent.append, lambda: Moment(now, int(1000 * now)), log, emit)
    log.open.clear()
    for number in range(3):
        driver.feed(Received(table.contribution(number)))
    ballot = driver.state.gathered.ballot
    assert ballot is not None
    writing = asyncio.create_task(driver.flush())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now += ballot.body.seconds + 1000.0
    driver.feed(Tick())
    log.open.set()
    await writing
    driver.feed(Tick())
    await driver.settled()
    assert driver.state.head.round == 1, "the ballot left just now"
    assert [each.kind for each in sent if isinstance(each, Statement)] == [*3 * [pb.KIND_CONTRIBUTION], pb.KIND_BALLOT]
    now += ballot.body.seconds + 1.0
    driver.feed(Tick())
    await driver.settled()
    assert driver.state.head.round == 2, "and voters had their time"
