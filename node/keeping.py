"""Which blobs of this machine somebody may still ask for, or a restart needs. The others go."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from dilocox.node.holding import Holding
from dilocox.node.starts import BOUNDARIES_KEPT, Starts
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore

__all__ = ["Keeping", "blobs_of"]


class Keeping:
    def __init__(
        self,
        store: BlobStore,
        holding: Holding,
        starts: Starts,
        states: Callable[[], Mapping[int, Mapping[int, bytes]]],
        roots: Callable[[], Mapping[int, bytes]],
        contributions: Callable[[], Iterable[pb.Contribution]],
    ) -> None:
        """`states`, `roots`: our own of the last rounds, by round and stage. `contributions`: of the open round."""
        self._store, self._holding, self._starts = store, holding, starts
        self._states, self._roots, self._contributions = states, roots, contributions
        self._boundaries: dict[int, set[bytes]] = {}
        """Payloads and base states that a restart would announce again, by round."""
        self._kept: set[bytes] = set()
        """Blobs that were once worth keeping: only these are ever removed while workers write."""

    def boundary(self, round: int, blobs: Iterable[bytes]) -> None:
        """A phase ended, and these are of it."""
        self._boundaries.setdefault(round, set()).update(blobs)

    async def begin(self, hellos: Iterable[worker.Hello]) -> None:
        """The workers write nothing yet: forget what an earlier process left behind, but not what it could resume."""
        for hello in hellos:
            for boundary in filter(self._starts.of_our_chain, hello.boundaries):
                self.boundary(boundary.round, blobs_of(boundary.payloads))
        # First: what comes meanwhile is not looked at.
        here = await asyncio.to_thread(self._store.digests) | await asyncio.to_thread(self._store.partials)
        await asyncio.to_thread(self._store.sweep, here - self._worth_keeping())

    def _worth_keeping(self) -> set[bytes]:
        for round in sorted(self._boundaries)[:-BOUNDARIES_KEPT]:
            del self._boundaries[round]
        keep = {digest for blobs in self._boundaries.values() for digest in blobs}
        for contribution in self._contributions():
            keep |= {contribution.leaves, *self._starts.payloads_of(contribution)}
        return keep | self._holding.blobs() | self._starts.worth_keeping(self._states(), self._roots())

    async def retain(self) -> None:
        """Remove blobs that were worth keeping and no longer are."""
        keep = self._worth_keeping()
        for digest in (self._kept | self._holding.forgotten()) - keep:
            await asyncio.to_thread(self._store.remove, digest)
        self._kept = keep


def blobs_of(payloads: Iterable[worker.StagePayload]) -> set[bytes]:
    return {digest for payload in payloads for digest in (payload.digest, payload.base_state)}
