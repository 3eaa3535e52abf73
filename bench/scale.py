"""Limits of a run's size: bytes of a commit, seconds to make and to verify it, the coordinator's traffic, its restart.

Every field of variable size is full: contributions with an audit root (one in eight names eight relays), votes with 16
findings, scores and a digest, evaluated reports, accounts, leases of two spans, newcomers that claim. The bar on a
commit's bytes is for a run without audits, settlement and erasure shards, which are off by default; the table shows
their addition. `--check` exits with 1 if a bar is missed.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from bench.report import bench_parser, judge, table, write
from dilocox.coordinator.driver import clock
from dilocox.coordinator.service import CoordinatorService
from dilocox.node.attest.verify import appraise
from dilocox.protocol import ids, limits
from dilocox.protocol.checks import availability_rules
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.chain import Closing
from dilocox.protocol.consensus.head import Head, advance, initial_head
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.store.chain_file import ChainFile, open_database
from dilocox.views import json_views as views
from tests import helpers

__all__ = ["main"]

SHAPES = ((50, 80), (200, 80), (1000, 80))
"""(clusters, stages)"""
RESTART = (10_000, 64)
"""(rounds, clusters)"""
LARGEST_COMMIT_BYTES = limits.MIB
LONGEST_CPU_SECONDS = 2.0
"""Compose and extend."""
LONGEST_BLOCK_SECONDS = 0.05
"""Longest block of the coordinator's event loop."""
LONGEST_RESTART_SECONDS = 10.0
"""CPU."""
NEWCOMERS = 64
UNDIALABLE = 8
"""One cluster in this many names relays."""
RUNNING_STEPS = 100
COORDINATOR = helpers.COORDINATOR


OPTIONS: dict[str, dict[str, Any]] = {
    "settlement": {"chain_id": 1, "contract": "0x" + "ab" * 20},
    "audit": {"segments": 4},
    "availability": {},
}
"""Options that a run may turn on."""


def run_of(clusters: int, stages: int, options: bool = True) -> Manifest:
    return helpers.manifest(
        model={"num_hidden_layers": stages, "stages": stages},
        training={"batch_size": 16},
        **(OPTIONS if options else {}),
        rounds={
            "count": 1_000_000,
            "inner_steps": RUNNING_STEPS,
            "max_inner_steps": 3 * RUNNING_STEPS,
            "min_clusters": clusters // 3,
            "start_clusters": clusters // 2,
            "liveness_seconds": 3600,
        },
    )


FAR_ON = pb.Standing(earned=64, counted=90_000, refused=300, scored=80_000)
"""Reputation of everyone on the roster, and of as many departed clusters as a run remembers."""


@dataclass
class Crowd:
    """Keys of all clusters of a run, and their statements of a round."""

    run: Manifest
    clusters: int
    identities: list[Identity] = field(init=False)

    def __post_init__(self) -> None:
        self.identities = [helpers.identity(number) for number in range(self.clusters)]

    def genesis(self) -> Statement[pb.Commit]:
        """Return a first commit that seats all of them at once, each with a lease that the next commit continues
        elsewhere."""
        ahead = chain.LEASE_PHASES * self.run.rounds.max_inner_steps * self.run.training.batch_size
        base = 1 << 40  # positions of a run that is far on
        roster = [
            pb.Member(
                cluster=one.peer,
                joined=1,
                samples_counted=1 << 30,
                lease=[pb.Span(start=base + number * ahead, end=base + (number + 1) * ahead)],
                account=one.key[:20] if self.run.settlement else b"",
                standing=FAR_ON,
            )
            for number, one in enumerate(sorted(self.identities, key=lambda one: one.peer))
        ]
        commit = pb.Commit(
            roster=roster,
            away=[pb.Away(key=helpers.identity(1_000_000 + number).key, standing=FAR_ON) for number in range(limits.AWAY)],
            closed_at_ms=clock().wall_ms,
            data_cursor=base + self.clusters * ahead,
            state=helpers.digest("state", 0),
            inner_steps=RUNNING_STEPS,
            norm=norm_code(1.0),
        )
        return seal(COORDINATOR, pb.KIND_COMMIT, self.run.run_id, commit)

    def state(self, head: Head) -> bytes:
        return head.state or helpers.digest("state", head.round)

    def everybody(self, kind: pb.Kind, body: Callable[[int, str], Any]) -> list[Statement[Any]]:
        return [seal(one, kind, self.run.run_id, body(number, one.peer)) for number, one in enumerate(self.identities)]

    @property
    def account(self) -> bytes:
        return bytes(range(20)) if self.run.settlement else b""

    def claims(self, head: Head) -> list[Statement[pb.Claim]]:
        body = pb.Claim(serial=1, round=head.round, head=head.digest, state=self.state(head), account=self.account)
        new = [helpers.identity(self.clusters + number + NEWCOMERS * head.round) for number in range(NEWCOMERS)]
        return [seal(one, pb.KIND_CLAIM, self.run.run_id, body) for one in new]

    def reports(self, head: Head) -> list[Statement[pb.StateReport]]:
        def body(number: int, peer: str) -> pb.StateReport:
            loss = 2.0 + number / 1000
            state = self.state(head)
            return pb.StateReport(round=head.round, head=head.digest, state=state, evaluated=True, evaluation_loss=loss)

        return self.everybody(pb.KIND_STATE_REPORT, body)

    def contributions(self, head: Head) -> list[Statement[pb.Contribution]]:
        def body(number: int, peer: str) -> pb.Contribution:
            lease = head.ledger.leases[peer]
            holders = [one.peer for one in self.identities[: limits.HOLDERS]] if number % UNDIALABLE == 0 else []
            return pb.Contribution(
                round=head.round,
                head=head.digest,
                inner_steps=RUNNING_STEPS,
                tokens=RUNNING_STEPS * self.run.tokens_per_step,
                loss=2.5,
                samples_read=lease.counted + RUNNING_STEPS * self.run.training.batch_size,
                leaves=helpers.digest("leaves", number, head.round),
                base_state=self.state(head),
                norm=norm_code(1.0 + number / self.clusters),
                size=80 << 20,
                effective_rank=97.5,
                error=0.3,
                holders=holders,
                audit=helpers.digest("audit", number, head.round) if self.run.audit.segments else b"",
                shares=helpers.digest("shares", number, head.round) if self.run.availability is not None else b"",
            )

        return self.everybody(pb.KIND_CONTRIBUTION, body)

    def receipts(self, head: Head, ballot: Statement[pb.Ballot], listed: Sequence[str]) -> list[Statement[pb.Receipt]]:
        at = {peer: index for index, peer in enumerate(listed)}
        samples = availability_rules.due(self.run, head)

        def body(number: int, peer: str) -> pb.Receipt:
            others = [index for index in range(len(listed)) if index != at[peer]]
            step = max(1, len(others) // limits.FINDINGS)
            worst = sorted(others[number % step :: step][: limits.FINDINGS])
            refused = worst[0]  # each voter rejects another contribution
            scored = [index for index in worst if index != refused]
            return pb.Receipt(
                round=head.round,
                ballot=ballot.signing,
                accepted=rules.bits([index not in (at[peer], refused) for index in range(len(listed))]),
                findings=[pb.Finding(index=refused, reason=pb.REASON_NORM_MISMATCH, stage=self.run.model.stages - 1)],
                scored=scored,
                score=[-150 - number % 100 for _ in scored],
                scores=helpers.digest("scores", number, head.round),
                lacking=availability_rules.told(samples, peer, head.roster),
            )

        return self.everybody(pb.KIND_RECEIPT, body)


# Making and verifying a commit.


def cpu_seconds(action: Callable[[], Any]) -> tuple[Any, float]:
    before = time.process_time()
    result = action()
    return result, time.process_time() - before


def fold(run: Manifest, head: Head, gathered: StatementPool, statements: list[Statement[Any]]) -> StatementPool:
    for statement in statements:
        after = rules.judge(run, head, gathered, statement)[1]
        assert after is not gathered
        gathered = after
    return gathered


def forget() -> None:
    """Clear caches of names that a fresh process would not have."""
    for cached in (ids.peer_id, ids.key_of_peer):
        getattr(cached, "cache_clear", lambda: None)()


def commit_and_verify(clusters: int, stages: int, options: bool = True) -> dict[str, Any]:
    """Make a commit and verify it. `options`: of a run with all of them."""
    run = run_of(clusters, stages, options)
    crowd = Crowd(run, clusters)
    head = advance(run, crowd.genesis())
    head = replace(head, state=b"", built_by=frozenset(head.roster))  # as after a round that counted all of them
    gathered = fold(run, head, StatementPool(), [*crowd.reports(head), *crowd.claims(head), *crowd.contributions(head)])
    alone = sorted(slot[0].digest for slot in gathered.contributions.values())
    body = pb.Ballot(round=head.round, head=head.digest, contributions=alone, seconds=60)
    ballot = seal(COORDINATOR, pb.KIND_BALLOT, run.run_id, body)
    gathered = fold(run, head, gathered, [ballot])
    gathered = fold(run, head, gathered, crowd.receipts(head, ballot, gathered.listed()))
    forget()
    closing = Closing(at_ms=clock().wall_ms, open_ms=10_000_000, collect_ms=9_000_000, vote_ms=900_000)
    body, compose_seconds = cpu_seconds(lambda: chain.compose(run, head, gathered, closing))
    raw = seal(COORDINATOR, pb.KIND_COMMIT, run.run_id, body).envelope.SerializeToString(deterministic=True)
    forget()
    _, extend_seconds = cpu_seconds(lambda: chain.extend(run, head, raw))
    assert len(body.counted) == clusters
    parts = {
        f.name: sum(len(e.SerializeToString()) for e in getattr(body, f.name))
        for f in body.DESCRIPTOR.fields
        if f.is_repeated and f.message_type
    }
    parts["ballot"] = body.ballot.ByteSize()
    return {
        "clusters": clusters,
        "stages": stages,
        "commit_bytes": len(raw),
        "compose_seconds": compose_seconds,
        "extend_seconds": extend_seconds,
        "bytes_of": {name: size for name, size in sorted(parts.items(), key=lambda item: -item[1]) if size},
    }


# The coordinator in a round.


class Blocks:
    """The longest that the event loop was kept: by one callback (CPU of its thread), and from one tick to the next (wall)."""

    def __init__(self) -> None:
        self.longest_callback = 0.0
        self.longest_gap = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            original(handle)
            self.longest_callback = max(self.longest_callback, time.thread_time() - before)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            asyncio.Handle._run = original  # type: ignore[method-assign]

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest_gap, last = max(self.longest_gap, now - last), now


class Sink(asyncio.Queue[Any]):
    """A watcher whose network is infinitely fast."""

    def put_nowait(self, item: Any) -> None:
        pass


@dataclass
class Desk:
    """Coordinator with a stream of every node, without a network; counts the bytes to the first watcher."""

    service: CoordinatorService
    crowd: Crowd
    sent: Counter[str] = field(default_factory=Counter)

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, clusters: int, stages: int) -> AsyncIterator["Desk"]:
        run = run_of(clusters, stages)
        crowd = Crowd(run, clusters)
        with closing(ChainFile(folder / "chain.db", run, views.describe)) as file:
            first = crowd.genesis()
            file.write(initial_head(COORDINATOR.peer), first)
            file.head = advance(run, first)
            desk = cls(CoordinatorService(COORDINATOR, file, pb.Envelope(), appraise), crowd)
            desk.service.resume()
            tasks = [asyncio.create_task(desk.service.driver.run()), asyncio.create_task(desk.service.run())]
            tasks.append(asyncio.create_task(desk.watch(crowd.identities[0])))
            for one in crowd.identities[1:]:
                desk.service.greet(desk.request(one), one.peer)
                desk.service.watchers.add(Sink())
            await desk.until(lambda: len(desk.service.watchers) == clusters)
            yield desk
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def request(self, one: Identity) -> services.WatchRequest:
        hello = seal(
            one, pb.KIND_HEARTBEAT, self.crowd.run.run_id, pb.Heartbeat(sequence=1, head=self.service.chain.head.digest)
        )
        return services.WatchRequest(from_round=1, hello=hello.envelope)

    async def watch(self, one: Identity) -> None:
        async for event in self.service.follow(self.request(one), one.peer, ""):
            what = event.WhichOneof("event") or ""
            if what == "statement":
                what = pb.Kind.Name(event.statement.kind).removeprefix("KIND_").lower()
            self.sent[what] += event.ByteSize()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def say(self, statements: list[Statement[Any]]) -> None:
        for statement in statements:
            judgement = await self.service.judge(statement.envelope, statement.peer)
            assert judgement == rules.ACCEPT, judgement
            await asyncio.sleep(0)  # every statement arrives in a separate call

    async def round(self) -> float:
        """Run one round of all clusters; return CPU seconds except those of the clusters' own signatures."""
        service, crowd, head = self.service, self.crowd, self.service.state.head
        spent = 0.0

        async def said(make: Callable[[], list[Statement[Any]]]) -> None:
            nonlocal spent
            statements = await asyncio.to_thread(make)
            before = time.process_time()
            await self.say(statements)
            spent += time.process_time() - before

        beats = [pb.Heartbeat(sequence=1 + head.round, head=head.digest) for _ in crowd.identities]
        await said(lambda: crowd.everybody(pb.KIND_HEARTBEAT, lambda number, _: beats[number]))
        await said(lambda: crowd.reports(head))
        await said(lambda: crowd.claims(head))
        await said(lambda: crowd.contributions(head))
        before = time.process_time()
        await self.until(lambda: service.ballot is not None)
        spent += time.process_time() - before
        ballot, listed = service.state.gathered.ballot, service.state.gathered.listed()
        assert ballot is not None
        await said(lambda: crowd.receipts(head, ballot, listed))
        before = time.process_time()
        await self.until(lambda: service.chain.head.round > head.round)
        await self.drained(lambda: sum(queue.qsize() for queue in service.watchers))
        return spent + time.process_time() - before

    async def drained(self, waiting: Callable[[], int]) -> None:
        await self.until(lambda: not waiting())


async def coordinate(clusters: int, stages: int) -> dict[str, Any]:
    blocks = Blocks()
    with tempfile.TemporaryDirectory() as folder:
        async with Desk.open(Path(folder), clusters, stages) as desk:
            await desk.round()  # the first one after a start is like no other
            desk.sent.clear()
            with blocks.watching():
                spent = await desk.round()
            presence = desk.service.liveness.view().ByteSize()
            commit = desk.service.chain.commit(desk.service.chain.length - 1)
    assert commit is not None
    assert len(commit.body.counted) == clusters
    watchers = len(commit.body.roster)
    return {
        "coordinator_cpu_seconds": spent,
        "longest_callback_seconds": blocks.longest_callback,
        "longest_gap_seconds": blocks.longest_gap,
        "bytes_to_each": dict(desk.sent),
        "bytes_out": sum(desk.sent.values()) * clusters,
        "presence_bytes": presence,
        "roster": watchers,
    }


# Starting again.


async def restart(rounds: int, clusters: int) -> dict[str, Any]:
    """Return the CPU seconds until a coordinator of a long run answers: a real last commit after `rounds` copies of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Desk.open(folder, clusters, 80) as desk:
            await desk.round()
            run = desk.crowd.run
            last = desk.service.chain.commit(1)
        assert last is not None
        make_long(folder / "chain.db", run, last, rounds)
        size = (folder / "chain.db").stat().st_size
        before, wall = time.process_time(), time.perf_counter()
        with closing(ChainFile(folder / "chain.db", run, views.describe)) as file:
            service = CoordinatorService(COORDINATOR, file, pb.Envelope(), appraise)
            service.resume()
            stream = service.follow(services.WatchRequest(from_round=rounds), "", "")
            tip = (await anext(stream)).tip
            spent, waited = time.process_time() - before, time.perf_counter() - wall
            assert tip.round == rounds
            await cast(AsyncGenerator[Any], stream).aclose()
    return {"rounds": rounds, "clusters": clusters, "database_bytes": size, "cpu_seconds": spent, "wall_seconds": waited}


def make_long(path: Path, run: Manifest, last: Statement[pb.Commit], rounds: int) -> None:
    """Write copies of the last commit with right checksums, and a last one that is signed for its position."""
    body = pb.Commit()
    body.CopyFrom(last.body)
    body.round = rounds - 1
    sealed = seal(COORDINATOR, pb.KIND_COMMIT, run.run_id, body).envelope.SerializeToString(deterministic=True)
    with closing(open_database(path)) as database:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {rounds - 2})"
        database.execute("BEGIN")
        database.execute(f"{numbers} INSERT INTO commits SELECT i, envelope, checksum FROM n, commits WHERE round = 1")
        database.execute(f"{numbers} INSERT INTO views SELECT i, row, detail FROM n, views WHERE round = 1")
        database.execute("INSERT INTO commits VALUES (?, ?, ?)", (rounds - 1, sealed, sha256(sealed)))
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def missed(shapes: list[dict[str, Any]], again: dict[str, Any]) -> list[str]:
    """Return the missed bars, as sentences."""
    found = []
    for one in shapes:
        at = f"{one['clusters']} × {one['stages']}"
        seconds = one["compose_seconds"] + one["extend_seconds"]
        if one["bare_commit_bytes"] > LARGEST_COMMIT_BYTES:
            found.append(f"{at}: a commit of {one['bare_commit_bytes']:,} bytes; at most {LARGEST_COMMIT_BYTES:,}")
        if seconds > LONGEST_CPU_SECONDS:
            found.append(f"{at}: {seconds:.2f} CPU s to compose and extend; at most {LONGEST_CPU_SECONDS}")
        if one["longest_callback_seconds"] > LONGEST_BLOCK_SECONDS:
            milliseconds = 1000 * one["longest_callback_seconds"]
            found.append(f"{at}: the event loop was kept for {milliseconds:.0f} ms; at most {1000 * LONGEST_BLOCK_SECONDS:.0f}")
    if again["cpu_seconds"] > LONGEST_RESTART_SECONDS:
        found.append(f"a restart took {again['cpu_seconds']:.1f} CPU s; at most {LONGEST_RESTART_SECONDS}")
    return found


def main(quick: bool = False) -> list[str]:
    """Print and write the figures; return the missed bars. `quick`: the smallest shape, and a short chain."""
    shapes: list[dict[str, Any]] = []
    for clusters, stages in SHAPES[:1] if quick else SHAPES:
        bare = commit_and_verify(clusters, stages, options=False)["commit_bytes"]
        made = commit_and_verify(clusters, stages)
        shapes.append({**made, "bare_commit_bytes": bare, **asyncio.run(coordinate(clusters, stages))})
    again = asyncio.run(restart(500 if quick else RESTART[0], RESTART[1]))
    columns = [
        "clusters",
        "stages",
        "commit",
        "with options",
        "compose s",
        "extend s",
        "round CPU s",
        "callback ms",
        "gap ms",
        "out MB",
        "presence",
    ]
    table(
        columns,
        [
            [
                str(one["clusters"]),
                str(one["stages"]),
                f"{one['bare_commit_bytes']:,}",
                f"{one['commit_bytes']:,}",
                f"{one['compose_seconds']:.3f}",
                f"{one['extend_seconds']:.3f}",
                f"{one['coordinator_cpu_seconds']:.2f}",
                f"{1000 * one['longest_callback_seconds']:.1f}",
                f"{1000 * one['longest_gap_seconds']:.1f}",
                f"{one['bytes_out'] / 1e6:,.1f}",
                f"{one['presence_bytes']:,}",
            ]
            for one in shapes
        ],
    )
    for one in shapes:
        print(f"{one['clusters']}: bytes of a commit: {one['bytes_of']}; to each watcher: {one['bytes_to_each']}")
    print(
        f"started again after {again['rounds']:,} rounds of {again['clusters']} ({again['database_bytes'] / 1e6:,.0f} MB) in"
        f" {again['cpu_seconds']:.2f} CPU s, {again['wall_seconds']:.2f} s"
    )
    write("scale", {"shapes": shapes, "restart": again}, quick)
    return missed(shapes, again)


if __name__ == "__main__":
    arguments = bench_parser("bench.scale", __doc__, "the smallest shape and a short chain").parse_args()
    sentences = main(arguments.quick)
    judge(sentences, arguments.check)
