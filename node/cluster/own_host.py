"""Work of a host for its own stages. The lead host requests the same of the other hosts."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.node.exchange.payload_checker import PayloadChecker
from dilocox.node.exchange.relays import Relays
from dilocox.node.exchange.shards import Roots
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol.member.member_io import Verdict
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import Statement

__all__ = ["OwnHost"]


class OwnHost:
    def __init__(
        self,
        hosted: HostedStages,
        checker: PayloadChecker,
        applies: ApplyBuilder,
        starts: ResumePlanner,
        roots: Roots,
        relays: Relays,
    ) -> None:
        self._hosted, self._checker, self._applies = hosted, checker, applies
        self._starts, self._roots, self._relays = starts, roots, relays

    def host(self, stages: Iterable[int]) -> None:
        """Have these stages from now on."""
        self._hosted.host(stages)

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Download and check the payloads of this host's stages, until cancelled; `base`: this node's state root."""
        return await self._checker.judge(contribution, base, rank_or_k)

    async def take(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Download what a commit counts for this host's stages. Raises RemoteError if no peer serves it."""
        return await self._applies.take(commit)

    async def have(self, start: worker.Start, say: Callable[[str], None]) -> list[worker.Apply]:
        """Download what a start needs of our stages; return the commits that it replays. Raises RemoteError where it cannot."""
        return await self._starts.have(start, say)

    async def with_commits(self, start: worker.Start) -> None:
        """Add the commits that a start needs, from this host's chain. Raises RemoteError."""
        await self._starts.with_commits(start)

    async def sound(self, hello: worker.Hello) -> worker.Hello:
        """Return a worker's hello, with only those checkpoints whose payloads are here and valid."""
        return await asyncio.to_thread(self._starts.sound, hello)

    async def with_roots(self, boundary: worker.Boundary) -> worker.Boundary:
        """Return what a worker of ours made, with the root over the shards of each payload."""
        return await asyncio.to_thread(self._roots.added, boundary)

    async def work_root(self, index: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Return the root over the shards of the announced payloads; empty in a run without shards."""
        return await asyncio.to_thread(self._roots.of_work, index, announced)

    def serves_its_own(self) -> bool:
        """Return whether peers download our payloads from this host."""
        return self._relays.serves_its_own()

    async def find_relays(self, blobs: Sequence[bytes]) -> Sequence[str]:
        """Have relays store these blobs; return their peer ids."""
        return await self._relays.find(blobs)
