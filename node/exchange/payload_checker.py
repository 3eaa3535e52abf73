"""A voter's checks of a contribution: its payload index, and the payloads of our stages. Heavy work runs in threads."""

import logging
from collections.abc import Mapping
from functools import partial

from dilocox.node.exchange.downloader import Downloader, Roster, had
from dilocox.node.exchange.shards import NO_ROOTS, Roots
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol import limits
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.member.member_io import Verdict
from dilocox.protocol.payload.payload_index import check_bounds, check_leaves, check_payload, layout_of, read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["PayloadChecker"]

log = logging.getLogger(__name__)


class PayloadChecker:
    def __init__(
        self,
        manifest: Manifest,
        downloader: Downloader,
        hosted: HostedStages,
        roster: Roster = dict,
        roots: Roots = NO_ROOTS,
    ) -> None:
        self._manifest, self._downloader, self._hosted = manifest, downloader, hosted
        self._roster, self._roots = roster, roots

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Download and check the payloads of this host's stages, until cancelled; `base`: this node's state root."""
        body, stage, roster = contribution.body, 0, self._roster()
        try:
            if body.base_state != base:
                raise RemoteError(pb.REASON_WRONG_BASE, "its base state differs from this node's")
            providers = [contribution.peer, *body.holders]
            fetch = partial(self._downloader.fetch_forever, body.leaves, providers, limits.LEAVES_BYTES)
            leaves = await had(fetch, partial(self._checked_index, body, roster))
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

    def _checked_index(self, body: pb.Contribution, roster: Mapping[str, Cluster]) -> list[pb.Leaf]:
        """Return the payload index of a contribution. Raises RemoteError where they do not agree. Blocking."""
        leaves = read_leaves(self._manifest, self._downloader.store.read(body.leaves))
        check_leaves(body, leaves)
        self._roots.check_work(body, leaves, roster)
        return leaves

    def _check(
        self, contribution: Statement[pb.Contribution], leaf: pb.Leaf, rank_or_k: int, roster: Mapping[str, Cluster]
    ) -> None:
        """Raise RemoteError where a payload, or the root over its erasure shards, is not what its payload index says. Blocking."""
        raw = self._downloader.store.view(leaf.digest)
        check_payload(self._manifest, contribution.peer, contribution.body.round, leaf, raw, rank_or_k)
        self._roots.check_root(leaf, roster)
