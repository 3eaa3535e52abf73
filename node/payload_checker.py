"""A voter's checks of a contribution: its payload index, and the payloads of our stages. Heavy work runs in threads."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from dilocox.node.downloader import Downloader, Roster, had, read_index
from dilocox.node.hosted import HostedStages
from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.facts import Verdict
from dilocox.protocol.head import Cluster
from dilocox.protocol.ids import short
from dilocox.protocol.leaves import check_bounds, check_leaves, check_payload, layout_of
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["PayloadChecker"]

log = logging.getLogger(__name__)


class PayloadChecker:
    def __init__(self, manifest: Manifest, downloader: Downloader, hosted: HostedStages, roster: Roster = dict) -> None:
        self._manifest, self._downloader, self._hosted, self._roster = manifest, downloader, hosted, roster

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Download and check the payloads of this host's stages, until cancelled; `base`: this node's state root."""
        body, stage, roster = contribution.body, 0, self._roster()
        try:
            if body.base_state != base:
                raise RemoteError(pb.REASON_WRONG_BASE, "it built on another state than ours")
            providers = [contribution.peer, *body.holders]
            fetch = partial(self._downloader.fetch_forever, body.leaves, providers, limits.LEAVES_BYTES)
            leaves = await read_index(self._manifest, self._downloader.store, body.leaves, fetch)
            check_leaves(body, leaves)
            if self._manifest.availability is not None:
                await had(fetch, partial(self._check_work, body, leaves, roster))
            for leaf in leaves:
                stage = leaf.stage
                check_bounds(self._manifest, leaf)
                if stage in self._hosted:
                    layout_of(self._manifest, stage, rank_or_k).check_size(leaf.size)
                    fetch = partial(self._downloader.fetch_forever, leaf.digest, providers, leaf.size, stage)
                    await had(fetch, partial(self._check, contribution, leaf, rank_or_k, roster))
        except RemoteError as error:
            log.info("payload of %s, stage %d: %s", short(contribution.peer), stage, error)
            return error.reason, stage
        return pb.REASON_UNSPECIFIED, 0

    def _check(
        self, contribution: Statement[pb.Contribution], leaf: pb.Leaf, rank_or_k: int, roster: Mapping[str, Cluster]
    ) -> None:
        """Raise RemoteError where a payload, or the root over its erasure shards, is not what its payload index says. Blocking."""
        raw = self._downloader.store.view(leaf.digest)
        check_payload(self._manifest, contribution.peer, contribution.body.round, leaf, raw, rank_or_k)
        if self._manifest.availability is not None:
            self._check_root(leaf, roster)

    def _check_work(self, body: pb.Contribution, leaves: Sequence[pb.Leaf], roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a contribution names another root than that of its shards. Blocking."""
        from dilocox.protocol.data_root import check_work
        from dilocox.transport.shares import share_root

        check_work(body, share_root(self._manifest, roster, self._downloader.store, body.leaves, None), leaves)

    def _check_root(self, leaf: pb.Leaf, roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a payload makes other shards than its payload index says. Blocking."""
        from dilocox.protocol.data_root import check_root
        from dilocox.transport.shares import share_root

        check_root(leaf, share_root(self._manifest, roster, self._downloader.store, leaf.digest, leaf.stage))
