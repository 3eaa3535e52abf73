"""Audits for which this node was drawn (protocol/checks/audit_rules.py). It fetches two states of a cluster's phase, runs
the steps between them again in a process of low priority, and reports the difference.

It reports nothing for an audit that this machine cannot do: for lack of memory, disk or data, after a time offline, or
if the round ends first.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dilocox.node.audit.messages import Found, Task
from dilocox.node.context.peer import MANIFEST
from dilocox.node.member.checks import Loops, Parts
from dilocox.node.planning.memory_model import fullest_device, host_bytes
from dilocox.node.workers.devices import Devices, available_bytes
from dilocox.protocol import events, limits
from dilocox.protocol.checks import audit_rules
from dilocox.protocol.checks.audit_rules import Audit, Result
from dilocox.protocol.checks.audits import Audited, audits_of
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.consensus.data_leases import Lease
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.corpus import Corpus, order_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import phase_bytes
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox.transport.process.processes import end_process, start_process
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import corpus_in

__all__ = ["AuditPlaces", "Auditor", "in_a_process", "loops"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval of checks for new audits."""
PRESENT_SHARE = 0.5
"""Least part of a round during which this node must have asked, to report that an author did not serve. Otherwise the node
may have been offline itself."""
T = TypeVar("T")


@dataclass(frozen=True)
class AuditPlaces:
    """Places on this machine."""

    home: Path
    """Folder for the process's log and parent pipe."""
    manifest: Path
    """Its canonical bytes."""
    data: BlobStore
    """Store with the run's corpus."""
    own: BlobStore
    """Store of this node's blobs of the run."""
    states: BlobStore
    """Store for fetched states, and nothing else."""
    named: bool
    """The operator named the corpus' folder: nothing is put there."""


async def in_a_process(task: Task, home: Path) -> Found:
    """`home`: for its log, and the pipe by which it ends with us. Raises LocalError where it cannot."""
    pipe, process = ParentPipe(home), None
    try:
        with (home / "audits.log").open("wb") as output:
            process = await start_process(
                *(sys.executable, "-P", "-m", "dilocox.node.training.worker.audit"),
                env={**pipe.environment(), "OMP_NUM_THREADS": str(max(1, min(task.threads, os.cpu_count() or 1)))},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
            )
        said, _ = await process.communicate(json.dumps(asdict(task)).encode())
    finally:
        pipe.close()  # it ends with it, whatever it does
        if process is not None:
            await end_process(process)
    if process.returncode or not said:
        raise LocalError(f"the audit process ended with {process.returncode}: see audits.log")
    return Found(**json.loads(said))


class Fetcher(Protocol):
    async def fetch(self, digest: bytes, providers: Iterable[str], max_size: int = ..., stage: int | None = None) -> None:
        """Have the blob. Raises RemoteError."""


class Us(Protocol):
    """This node, as the audits see it."""

    manifest: Manifest
    identity: Identity
    chain: ChainFile
    state: MemberState

    def feed(self, event: Audited) -> None: ...

    def emit(self, event: events.Event) -> None: ...


@dataclass
class _Duty:
    """Audit in progress."""

    audit: Audit
    work: asyncio.Task[None] | None = None
    wanted: set[bytes] = field(default_factory=set)
    """Blobs that it needs."""
    room: int = 0
    """Bytes of the disk that it may fill."""
    asking: bool = True
    """True while some blobs are missing."""
    asked_seconds: float = 0.0
    """Seconds of requests while the coordinator was live."""


class Auditor:
    def __init__(
        self,
        us: Us,
        machine: Devices,
        place: AuditPlaces,
        states: Fetcher,
        data: Fetcher,
        compute: Callable[[Task, Path], Awaitable[Found]] = in_a_process,
        free: Callable[[], int | None] = available_bytes,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`states`, `data`: fetch into the stores of these names. `compute`: raises LocalError where it cannot; `free`: bytes of
        memory."""
        self._compute, self._free, self._look_seconds = compute, free, look_seconds
        self._us, self._manifest, self._chain = us, us.manifest, us.chain
        self._machine, self._place, self._states, self._data = machine, place, states, data
        self._one_at_a_time = asyncio.Lock()
        """Held by the process that computes."""
        self._duties: dict[tuple[int, str], _Duty] = {}
        self._wanted: Counter[bytes] = Counter()
        """Needed blobs, with the number of audits."""

    async def run(self) -> None:
        """Run audits until cancelled, in a run with audits."""
        done: set[tuple[int, str]] = set()
        looked = time.monotonic()
        try:
            while self._manifest.audit.segments:
                head = self._chain.head
                for audit in audit_rules.duties(audits_of(head), head.round, self._us.identity.peer):
                    if audit.name not in done and audit.name not in self._duties:
                        duty = self._duties[audit.name] = _Duty(audit)
                        duty.work = asyncio.create_task(self._audit(duty), name=f"audit {short(audit.cluster)}")
                for name, duty in list(self._duties.items()):
                    if duty.work is not None and duty.work.done():
                        del self._duties[name]
                        duty.work.result()
                        done.add(name)
                if not self._duties:
                    await asyncio.to_thread(self._clear)
                done = {name for name in done if name[0] >= head.round - audit_rules.WAIT}
                await asyncio.sleep(self._look_seconds)
                looked = self._count_time(looked)
        finally:
            for duty in self._duties.values():
                if duty.work is not None:
                    duty.work.cancel()

    def _count_time(self, since: float) -> float:
        """Return the time, and add the time since the last check if the coordinator was live. A machine that slept made no
        requests."""
        now = time.monotonic()
        if self._us.state.connected:
            for duty in self._duties.values():
                duty.asked_seconds += min(now - since, 2 * self._look_seconds) if duty.asking else 0.0
        return now

    def _clear(self) -> None:
        """Delete blobs that arrived after their audit ended. Blocking."""
        self._place.states.sweep(self._place.states.digests() | self._place.states.partials())

    async def _audit(self, duty: _Duty) -> None:
        """Say what we find, or nothing."""
        audit = duty.audit
        try:
            found = await self._find(duty)
        except (LocalError, OSError) as error:
            self._report(audit, "nothing", str(error))
        else:
            self._us.feed(Audited(audit, found))
            self._report(
                audit, audit_rules.verdict_name(found.verdict), f"distance {found.distance:.2g}" if found.distance else ""
            )
        finally:
            duty.room = 0
            self._wanted.subtract(duty.wanted)
            for digest in duty.wanted:
                if not self._wanted[digest]:  # another's audit may be of the same state
                    del self._wanted[digest]
                    self._place.states.remove(digest)

    def _report(self, audit: Audit, found: str, why: str) -> None:
        self._us.emit(events.Audited(audit.round, audit.cluster, found, why))

    async def _before(self, round: int, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work; None if this round opens first."""
        doing = asyncio.create_task(work)
        try:
            while not doing.done() and self._chain.head.round < round:
                await asyncio.wait({doing}, timeout=self._look_seconds)
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()

    async def _find(self, duty: _Duty) -> Result:
        """Raises LocalError where this machine cannot say."""
        audit, began = duty.audit, self._chain.head.round
        try:
            fetched = await self._before(max(audit.due, began + 1), self._fetch(duty))
        except RemoteError as error:
            log.warning("%s committed to something that is not a local phase: %s", short(audit.cluster), error)
            return Result(pb.AUDIT_MALFORMED)
        duty.asking, duty.room = False, 0
        if fetched is None and began < audit.due:
            self._check_presence(duty)
            return Result(pb.AUDIT_UNSERVED)
        found = await self._before(audit.due + 1, self._compare(*fetched)) if fetched is not None else None
        if found is None:
            raise LocalError(f"round {audit.due} ended first")
        return found

    def _check_presence(self, duty: _Duty) -> None:
        """A whole round is time enough for who serves, where we asked for most of it. Raises LocalError."""
        commit = self._chain.commit(duty.audit.due - 1)
        if commit is None or duty.asked_seconds < PRESENT_SHARE * commit.body.open_ms / 1000:
            raise LocalError(f"this machine was absent for most of round {duty.audit.due - 1}")

    async def _fetch(self, duty: _Duty) -> tuple[pb.Marks, audit_rules.Stretch]:
        """Fetch the checkpoints, and both states of the drawn segment, however long it takes. Raises RemoteError if they
        do not match the author's phase, LocalError without space."""
        audit = duty.audit
        commit, before = self._chain.commit(audit.round), self._chain.commit(audit.round - 1)
        if commit is None or before is None:
            raise LocalError(f"commit {audit.round} is not on this disk any more")
        body = next(item.contribution for item in taken(commit.body) if item.cluster == audit.cluster)
        member = next(each for each in before.body.roster if each.cluster == audit.cluster)
        lease = Lease(member.samples_counted, tuple((span.start, span.end) for span in member.lease))
        await self._have(body.audit, duty, limits.MARKS_BYTES)
        marks = audit_rules.read_marks(self._manifest, body, lease, self._place.states.read(body.audit))
        stretch = audit_rules.stretch(self._manifest, audit.lot, lease, marks.marks)
        await self._take_room(duty)
        for stage, size in enumerate(self._sizes()):
            for mark in (stretch.first, stretch.last):
                await self._have(mark.states[stage], duty, size, stage)
                if self._place.states.size(mark.states[stage]) != size:
                    raise RemoteError(pb.REASON_SIZE_MISMATCH, f"a state of stage {stage} does not have {size} bytes")
        return marks, stretch

    async def _take_room(self, duty: _Duty) -> None:
        """Reserve space for two states. Raises LocalError if the disk has less, beside what other audits may still write."""
        disk = await asyncio.to_thread(shutil.disk_usage, self._place.states.folder)
        needed, free = 2 * sum(self._sizes()), disk.free - sum(other.room for other in self._duties.values())
        if needed > free:
            raise LocalError(f"two states need {needed:,} bytes of disk, but {max(0, free):,} are free")
        duty.room = needed

    async def _have(self, digest: bytes, duty: _Duty, most: int, stage: int | None = None) -> None:
        """Fetch a blob, until a peer serves it."""
        if digest not in duty.wanted:
            duty.wanted.add(digest)
            self._wanted[digest] += 1
        while True:
            try:
                return await self._states.fetch(digest, [duty.audit.cluster], most, stage)
            except RemoteError as error:
                log.info("cannot fetch a state of %s: %s", short(duty.audit.cluster), error)
                await asyncio.sleep(self._look_seconds)

    async def _compare(self, marks: pb.Marks, stretch: audit_rules.Stretch) -> Result:
        await self._have_samples(stretch)
        async with self._one_at_a_time:
            self._check_memory()
            found = await self._compute(self._task(marks, stretch), self._place.home)
        said = pb.AuditResult(verdict=found.verdict, distance=found.distance)
        return Result(said.verdict, said.distance)

    def _sizes(self) -> list[int]:
        """Return the bytes of a state within a phase, by stage."""
        model, muon = self._manifest.model, self._manifest.training.optimizer == "muon"
        return [phase_bytes(model, muon, stage) for stage in range(model.stages)]

    def _check_memory(self) -> None:
        """Raises LocalError."""
        manifest, free = self._manifest, self._free()
        device = fullest_device(manifest, 1, manifest.training.microbatches, manifest.training.in_bfloat16(self._machine.cuda))
        needed = host_bytes(manifest, range(manifest.model.stages)) + (0 if self._machine.cuda else device.total)
        if free is not None and needed > free:
            raise LocalError(f"the whole model needs {needed:,} bytes of memory, but {free:,} are free")

    async def _have_samples(self, stretch: audit_rules.Stretch) -> None:
        """Fetch the shards with these samples. Raises LocalError if that fails."""
        corpus = await asyncio.to_thread(corpus_in, self._place.data, bytes.fromhex(self._manifest.data.digest))
        if corpus is None:
            raise LocalError("the run's data are not on this disk yet")
        for digest, size in await asyncio.to_thread(self._shards, corpus, stretch):
            try:
                if not self._place.named:
                    await self._data.fetch(digest, self._chain.parties, size)
                elif not await asyncio.to_thread(self._place.data.sound, digest):
                    raise LocalError(f"shard {digest.hex()} of the run's data is not in {self._place.data.folder}")
            except RemoteError as error:
                raise LocalError(f"no peer serves the samples that it read: {error.detail}") from error

    def _shards(self, corpus: Corpus, stretch: audit_rules.Stretch) -> list[tuple[bytes, int]]:
        """Blocking: an epoch of many shards takes a while."""
        order = order_of(self._manifest, corpus)
        numbers = dict.fromkeys(number for at in stretch.positions for number in order.shards(at, at + 1))
        return [(bytes.fromhex(corpus.training[n].digest), corpus.size(corpus.training[n])) for n in numbers]

    def _task(self, marks: pb.Marks, stretch: audit_rules.Stretch) -> Task:
        place = self._place
        return Task(
            manifest=str(place.manifest),
            data=str(place.data.folder),
            blobs=str(place.states.folder),
            own_blobs=str(place.own.folder),
            first=[digest.hex() for digest in stretch.first.states],
            last=[digest.hex() for digest in stretch.last.states],
            optimizer_steps=stretch.first.optimizer_steps,
            positions=list(stretch.positions),
            cuda=self._machine.cuda,
            machine=marks.machine,
            threads=marks.threads,
            workers=marks.workers,
        )


def loops(parts: Parts) -> Loops:
    """Return the loop of a node that audits."""
    place, states = parts.place, BlobStore(parts.place.folder / "audits")
    places = AuditPlaces(parts.home, place.folder / MANIFEST, parts.corpus.store, place.store, states, parts.corpus.named)
    auditor = Auditor(parts.member, parts.machine, places, parts.fetching_into(states), parts.corpus.supplies)
    return {"audit": auditor.run()}
