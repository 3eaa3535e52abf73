"""The parts of a node that download, check and apply payloads, made for tests."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.node.exchange.downloader import Downloader, Roster
from dilocox.node.exchange.payload_checker import PayloadChecker
from dilocox.node.exchange.shards import Roots, find_shards, roots_of
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.protocol.run.manifest import Manifest


class Nobody:
    """A directory that knows no peer."""

    async def look_up(self, peer: str) -> None:
        pass

    async def find(self, peer: str) -> None:
        return None


@dataclass(frozen=True)
class Exchange:
    manifest: Manifest
    downloader: Downloader
    hosted: HostedStages
    checker: PayloadChecker
    applies: ApplyBuilder
    roots: Roots

    def starts(self, chain: Any) -> ResumePlanner:
        return ResumePlanner(self.manifest, chain, self.downloader, self.applies, self.hosted)

    def own_host(self, chain: Any, relays: Any) -> OwnHost:
        return OwnHost(self.hosted, self.checker, self.applies, self.starts(chain), self.roots, relays)


def exchange_of(
    run: Manifest,
    downloader: Downloader,
    stages: Iterable[int] | None = None,
    roster: Roster = dict,
    roots: Roots | None = None,
) -> Exchange:
    """Return an exchange. `stages`: those of its host; None: all. `roots`: over erasure shards; None: those of the run's plugin."""
    hosted = HostedStages(range(run.model.stages) if stages is None else stages)
    roots = roots or roots_of(find_shards(run), downloader.store, roster)
    checker, applies = PayloadChecker(run, downloader, hosted, roster, roots), ApplyBuilder(run, downloader, hosted)
    return Exchange(run, downloader, hosted, checker, applies, roots)
