"""Retention of blobs on this machine: those that a peer may request, or a restart needs. All others are deleted."""

import asyncio
from collections.abc import Callable, Iterable

from dilocox.node.exchange.relay_store import RelayStore
from dilocox.node.state.resume_points import BOUNDARIES_KEPT, COMPLETE_KEPT, ResumePlanner
from dilocox.node.workers.audit_checkpoints import merged
from dilocox.node.workers.progress import Progress
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore, digest_of

__all__ = ["BlobRetention", "blobs_of"]


class BlobRetention:
    def __init__(
        self,
        store: BlobStore,
        relay_store: RelayStore,
        starts: ResumePlanner,
        progress: Progress,
        contributions: Callable[[], Iterable[pb.Contribution]],
        cluster: str,
    ) -> None:
        """`progress`: of our workers. `contributions`: of the open round, beside the judged ones. `cluster`: whose box we are."""
        self._cluster = cluster
        self._store, self._relay_store, self._starts = store, relay_store, starts
        self._progress, self._contributions = progress, contributions
        self._boundaries: dict[int, set[bytes]] = {}
        """Payloads and base states that a restart would announce again, by round."""
        self._complete: set[int] = set()
        """Rounds among them with complete checkpoints: after a power loss one of the last two counts."""
        self._marks: dict[int, list[pb.Marks]] = {}
        """Audit checkpoints of our contributions by round: of all our stages, or in parts."""
        self._documents: dict[int, bytes] = {}
        """Blobs that list them, if this host leads."""
        self._known: set[bytes] = set()
        """Blobs that are known and may be here: while workers write, only these are ever deleted."""
        self._judged: list[pb.Contribution] = []
        """Contributions that were judged: their blobs are deleted after their round, unless they must be stored by then."""
        self._one_at_a_time = asyncio.Lock()
        """Held by the deletion in progress: the last one knows what to store."""

    def boundary(self, round: int, blobs: Iterable[bytes], complete: bool = False) -> None:
        """Note the blobs of an ended phase. `complete`: its checkpoint has all private state."""
        blobs = set(blobs)
        if complete:
            self._complete.add(round)
        self._boundaries.setdefault(round, set()).update(blobs)
        self._known |= blobs

    def judged(self, contribution: pb.Contribution) -> None:
        """Note a contribution: its blobs are fetched, and may never be counted."""
        self._judged.append(contribution)

    def marks(self, round: int, marks: pb.Marks, document: bytes = b"") -> None:
        """Note the audit checkpoints of an ended phase. `document`: the blob that a contribution names; its states are
        here."""
        self._marks.setdefault(round, []).append(marks)
        self._known |= {state for mark in marks.marks for state in mark.states}
        if document:
            self._known.add(document)
            self._documents[round] = document

    def _announced(self) -> list[pb.Contribution]:
        """Return the known contributions of the open round."""
        round = self._starts.head.round
        return [*self._contributions(), *(each for each in self._judged if each.round >= round)]

    async def begin(self, hellos: Iterable[worker.Hello]) -> None:
        """The workers write nothing yet: forget what an earlier process left behind, but not what it could resume."""
        found: dict[int, list[tuple[list[int], pb.Marks]]] = {}
        for hello in hellos:
            for boundary in filter(self._starts.of_our_chain, hello.boundaries):
                self.boundary(boundary.round, blobs_of(boundary.payloads), boundary.complete)
                if boundary.HasField("marks"):
                    found.setdefault(boundary.round, []).append(([p.stage for p in boundary.payloads], boundary.marks))
        for round, parts in found.items():
            self.marks(round, merged(parts), digest_of([canonical(merged(parts))]))
        async with self._one_at_a_time:
            # Read first: later arrivals are not considered.
            here = await asyncio.to_thread(self._store.digests) | await asyncio.to_thread(self._store.partials)
            await asyncio.to_thread(self._store.sweep, here - await self._worth_keeping())

    async def _worth_keeping(self) -> set[bytes]:
        """Return the blobs to store at the time of the return: chain and payload indexes are read in a thread, later
        arrivals after them."""
        head: Head | None = None
        chain, payloads = set[bytes](), dict[bytes, list[bytes]]()
        while True:
            new = [contribution for contribution in self._announced() if contribution.leaves not in payloads]
            if head is not self._starts.head:
                head = self._starts.head
                chain = await asyncio.to_thread(self._starts.worth_keeping)
            elif new:
                payloads |= await asyncio.to_thread(self._payloads, new)
            else:
                break
        return chain | self._at_hand() | {digest for each in self._announced() for digest in payloads[each.leaves]}

    def _payloads(self, contributions: Iterable[pb.Contribution]) -> dict[bytes, list[bytes]]:
        """Return the payloads of contributions, by payload index. Blocking."""
        return {each.leaves: self._starts.payloads_of(each) for each in contributions}

    def _at_hand(self) -> set[bytes]:
        """Return the blobs that are needed, without reading anything."""
        self._complete = set(sorted(self._complete)[-COMPLETE_KEPT:])
        for round in set(sorted(self._boundaries)[:-BOUNDARIES_KEPT]) - self._complete:
            del self._boundaries[round]
        keep = {digest for blobs in self._boundaries.values() for digest in blobs}
        keep |= {contribution.leaves for contribution in self._announced()}
        keep |= self._starts.own_worth_keeping(self._progress.states, self._progress.roots)
        return keep | self._audited() | self._relay_store.blobs()

    def _audited(self) -> set[bytes]:
        """Return the states of our phases that auditors may still request; without audits there are none."""
        if not self._marks:
            return set()
        from dilocox.protocol.checks import audit_rules
        from dilocox.protocol.checks.audits import audits_of

        head, keep = self._starts.head, set[bytes]()
        for round in [round for round in self._marks if round < head.round - audit_rules.WAIT]:
            del self._marks[round]
            self._documents.pop(round, None)
        for round, parts in self._marks.items():
            needed = (audit_rules.needed(audits_of(head), head.round, self._cluster, round, part.marks) for part in parts)
            states = set[bytes]().union(*needed)
            keep |= states | ({self._documents[round]} if states and round in self._documents else set())
        newest = self._marks[max(self._marks)] if self._marks else []
        ends = {state for part in newest for mark in part.marks[-1:] for state in mark.states}
        return keep | ends  # possible start of the running phase, not reported yet

    async def retain(self) -> None:
        """Delete known blobs that are not needed."""
        async with self._one_at_a_time:
            round, judged = self._starts.head.round, self._judged
            self._judged = [each for each in judged if each.round >= round]
            closed = [each for each in judged if each.round < round]
            for leaves, payloads in (await asyncio.to_thread(self._payloads, closed)).items():
                self._known |= {leaves, *payloads}
            keep = await self._worth_keeping()
            gone = (self._known | self._relay_store.forgotten()) - keep
            self._known |= keep
            while gone := gone - self._at_hand():  # what became needed again stays
                digest = gone.pop()
                self._known.discard(digest)
                await asyncio.to_thread(self._store.remove, digest)


def blobs_of(payloads: Iterable[worker.StagePayload]) -> set[bytes]:
    return {digest for payload in payloads for digest in (payload.digest, payload.base_state)}
