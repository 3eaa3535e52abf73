"""Audits that this node was drawn for (protocol/auditing.py): fetch two states of somebody's phase, have the steps between them
taken again by a process of its own, behind everything else, and say what came of it.

What this machine cannot do it says nothing of: where memory or data are lacking, or the round is over first.
"""

import asyncio
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from dilocox.node.audit_task import Found, Task
from dilocox.node.exchange import Exchange
from dilocox.node.machine import Machine
from dilocox.node.memory import fullest_device, host_bytes
from dilocox.protocol import auditing, events, limits
from dilocox.protocol.auditing import Audit, Result
from dilocox.protocol.chain import taken
from dilocox.protocol.corpus import Corpus, order_of
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.facts import Audited
from dilocox.protocol.ledger import Lease
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.tensors import phase_bytes
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import corpus_in
from dilocox.transport.parent_pipe import ParentPipe

__all__ = ["Auditor", "Lies", "available_bytes"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks for what we were drawn for."""
MEMORY = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Memory of this machine that nobody uses now; None: the system does not say."""
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


@dataclass(frozen=True)
class Lies:
    """Where things lie on this machine."""

    home: Path
    """For the process's log and parent pipe."""
    manifest: Path
    """Its canonical bytes."""
    data: BlobStore
    """With the run's corpus."""
    own: BlobStore
    """What this node has of the run."""
    states: BlobStore
    """For what is fetched; nothing else lies there."""
    named: bool
    """The operator named the corpus' folder: nothing is put there."""


class Us(Protocol):
    """Who takes part here: speaks for our cluster."""

    manifest: Manifest
    identity: Identity
    chain: ChainFile

    def feed(self, event: Audited) -> None: ...

    def emit(self, event: events.Event) -> None: ...


class Auditor:
    def __init__(
        self,
        us: Us,
        machine: Machine,
        place: Lies,
        states: Exchange,
        data: Exchange,
    ) -> None:
        """`states`, `data`: fetch into the stores of these names."""
        self._us, self._manifest, self._chain = us, us.manifest, us.chain
        self._machine, self._place, self._states, self._data = machine, place, states, data
        self._done: set[tuple[int, str]] = set()

    async def run(self) -> None:
        """Until cancelled, where the run audits: one after the other, what is due first first."""
        await asyncio.to_thread(self._clear)
        while self._manifest.audit.segments:
            head = self._chain.head
            self._done = {name for name in self._done if name[0] >= head.round - auditing.WAIT}
            for audit in auditing.duties(head.audits, head.round, self._us.identity.peer):
                if audit.name not in self._done and await self._in_time(audit):
                    self._done.add(audit.name)
            await asyncio.sleep(LOOK_SECONDS)

    async def _in_time(self, audit: Audit) -> bool:
        """Whether there is no more to be found of it. Given up when the round is over in which we could say it."""
        looking = asyncio.create_task(self._look(audit), name=f"audit {audit.cluster[-8:]}")
        try:
            while not looking.done() and self._chain.head.round <= audit.due:
                await asyncio.wait({looking}, timeout=LOOK_SECONDS)
            if not looking.done():
                self._tell(audit, "nothing", f"round {audit.due} was over first")
                return True
            return looking.result()
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    def _clear(self) -> None:
        """What was fetched for an audit that is done. Blocking."""
        self._place.states.sweep(self._place.states.digests() | self._place.states.partials())

    async def _look(self, audit: Audit) -> bool:
        try:
            found = await self._find(audit)
        except LocalError as error:
            self._tell(audit, "nothing", str(error))
            return True
        if found is None:
            return False
        await asyncio.to_thread(self._clear)
        self._us.feed(Audited(audit, found))
        self._tell(audit, auditing.verdict_name(found.verdict), f"distance {found.distance:.2g}" if found.distance else "")
        return True

    def _tell(self, audit: Audit, found: str, why: str) -> None:
        self._us.emit(events.Audited(audit.round, audit.cluster, found, why))

    async def _find(self, audit: Audit) -> Result | None:
        """None: nobody serves its states yet. Raises LocalError where this machine cannot say."""
        commit, before = self._chain.commit(audit.round), self._chain.commit(audit.round - 1)
        if commit is None or before is None:
            raise LocalError(f"commit {audit.round} is not here any more")
        body = next(item.contribution for item in taken(commit.body) if item.cluster == audit.cluster)
        member = next(each for each in before.body.roster if each.cluster == audit.cluster)
        lease = Lease(member.samples_counted, tuple((span.start, span.end) for span in member.lease))
        self._check_memory()
        try:
            await self._states.fetch(body.audit, [audit.cluster], limits.MARKS_BYTES)
        except RemoteError as error:
            return self._unserved(audit, error)
        try:
            marks = auditing.read_marks(self._manifest, body, lease, self._place.states.read(body.audit))
        except RemoteError as error:
            log.warning("the marks of %s are not those of a phase: %s", audit.cluster, error)
            return Result(pb.AUDIT_MALFORMED)
        stretch = auditing.stretch(self._manifest, audit.lot, lease, marks.marks)
        sizes = self._sizes()
        try:
            for stage, size in enumerate(sizes):
                for mark in (stretch.first, stretch.last):
                    await self._states.fetch(mark.states[stage], [audit.cluster], size, stage)
        except RemoteError as error:
            return self._unserved(audit, error)
        states = [(mark.states[stage], size) for mark in (stretch.first, stretch.last) for stage, size in enumerate(sizes)]
        if any(self._place.states.size(digest) != size for digest, size in states):
            return Result(pb.AUDIT_MALFORMED)
        await self._have_samples(stretch)
        found = await self._compute(self._task(marks, stretch))
        said = pb.AuditResult(verdict=found.verdict, distance=found.distance)
        return Result(said.verdict, said.distance)

    def _sizes(self) -> list[int]:
        """Of a state of a phase, by stage."""
        model, muon = self._manifest.model, self._manifest.training.optimizer == "muon"
        return [phase_bytes(model, muon, stage) for stage in range(model.stages)]

    def _unserved(self, audit: Audit, error: RemoteError) -> Result | None:
        """It may still come, until we have to say it."""
        log.info("round %d: states of %s are not to be had: %s", audit.round, audit.cluster, error)
        return Result(pb.AUDIT_UNSERVED) if self._chain.head.round >= audit.due else None

    def _check_memory(self) -> None:
        """Raises LocalError."""
        manifest, free = self._manifest, available_bytes()
        device = fullest_device(manifest, 1, manifest.training.microbatches, manifest.training.in_bfloat16(self._machine.cuda))
        needed = host_bytes(manifest, range(manifest.model.stages)) + (0 if self._machine.cuda else device.total)
        if free is not None and needed > free:
            raise LocalError(f"the whole model takes {needed:,} bytes of memory; {free:,} are free")

    async def _have_samples(self, stretch: auditing.Stretch) -> None:
        """The shards that hold them. Raises LocalError where they cannot be had."""
        corpus = await asyncio.to_thread(corpus_in, self._place.data, bytes.fromhex(self._manifest.data.digest))
        if corpus is None:
            raise LocalError("the run's data are not here yet")
        for digest, size in await asyncio.to_thread(self._shards, corpus, stretch):
            try:
                if not self._place.named:
                    await self._data.fetch(digest, self._chain.parties, size)
                elif not await asyncio.to_thread(self._place.data.sound, digest):
                    raise LocalError(f"shard {digest.hex()} of the run's data is not in {self._place.data.folder}")
            except RemoteError as error:
                raise LocalError(f"nobody serves the samples that it read: {error.detail}") from error

    def _shards(self, corpus: Corpus, stretch: auditing.Stretch) -> list[tuple[bytes, int]]:
        """Blocking: an epoch of many shards takes a while."""
        order = order_of(self._manifest, corpus)
        numbers = dict.fromkeys(number for at in stretch.positions for number in order.shards(at, at + 1))
        return [(bytes.fromhex(corpus.training[n].digest), corpus.size(corpus.training[n])) for n in numbers]

    def _task(self, marks: pb.Marks, stretch: auditing.Stretch) -> Task:
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

    async def _compute(self, task: Task) -> Found:
        """Raises LocalError where the process cannot."""
        pipe = await asyncio.to_thread(ParentPipe, self._place.home)
        with (self._place.home / "audits.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "dilocox.node.training.audit"),
                env={**pipe.environment(), "OMP_NUM_THREADS": str(max(1, min(task.threads, os.cpu_count() or 1)))},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        try:
            said, _ = await process.communicate(json.dumps(asdict(task)).encode())
        finally:
            pipe.close()  # it ends with it, whatever it does
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode or not said:
            raise LocalError(f"the process that audits ended with {process.returncode}: see audits.log")
        return Found(**json.loads(said))
