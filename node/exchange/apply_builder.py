"""Inputs of the workers for a commit: the payloads that it counts, with weights and clips."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from dilocox.node.exchange.downloader import Downloader, read_index
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import CountedPayload, NamedBy, taken
from dilocox.protocol.consensus.chain import holders as holders_of
from dilocox.protocol.consensus.weighting import Announced, tensor_clips
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["ApplyBuilder", "takes_of"]

log = logging.getLogger(__name__)


class ApplyBuilder:
    def __init__(self, manifest: Manifest, downloader: Downloader, hosted: HostedStages) -> None:
        self._manifest, self._downloader, self._hosted = manifest, downloader, hosted

    async def payload_index(self, contribution: pb.Contribution, providers: Iterable[str]) -> list[pb.Leaf]:
        """Return the payload index of a counted contribution. Raises RemoteError where it cannot be downloaded or is malformed."""
        blob, by = contribution.leaves, NamedBy(contribution.round)
        fetch = partial(self._downloader.fetch, blob, providers, limits.LEAVES_BYTES, by=by)
        return await read_index(self._manifest, self._downloader.store, blob, fetch)

    async def take(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Download what a commit counts for this host's stages; return the workers' command. Raises RemoteError if no peer
        serves it."""
        holders, items, by = holders_of(commit.body), taken(commit.body), NamedBy(commit.body.round)
        leaves = []
        for item in items:
            providers = holders[item.cluster]
            announced = await self.payload_index(item.contribution, providers)
            ours = [leaf for leaf in announced if leaf.stage in self._hosted]
            wanted = (self._downloader.fetch(leaf.digest, providers, leaf.size, leaf.stage, by) for leaf in ours)
            await asyncio.gather(*wanted)
            leaves.append(announced)
        takes = await asyncio.to_thread(takes_of, self._manifest, items, leaves)
        return worker.Apply(commit=commit.envelope.SerializeToString(), takes=takes)

    async def counts(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Return the counted clusters and clips of a commit, without payloads. If no peer serves a payload index any more,
        the clips of single tensors are unknown."""
        holders, items = holders_of(commit.body), taken(commit.body)
        try:
            leaves = [await self.payload_index(item.contribution, holders[item.cluster]) for item in items]
        except RemoteError as error:
            log.info("commit %d: the clips of its tensors are unknown: %s", commit.body.round, error)
            takes = [worker.Take(cluster=item.cluster, weight=item.weight, clip=item.clip) for item in items]
        else:
            takes = await asyncio.to_thread(takes_of, self._manifest, items, leaves)
        return worker.Apply(commit=commit.envelope.SerializeToString(), takes=takes)


def takes_of(manifest: Manifest, items: Sequence[CountedPayload], leaves: Sequence[Sequence[pb.Leaf]]) -> list[worker.Take]:
    """Return what a commit takes of each counted contribution, in their order; `leaves`: payload index of each."""
    announced = [
        Announced(item.contribution.norm, item.clip, item.say, [leaf.norms for leaf in each])
        for item, each in zip(items, leaves, strict=True)
    ]
    return [
        worker.Take(
            cluster=item.cluster, weight=item.weight, clip=item.clip, payloads=[leaf.digest for leaf in each], clips=clips
        )
        for item, each, clips in zip(items, leaves, tensor_clips(manifest, announced), strict=True)
    ]
