"""Open the downloads of a run and the states that its workers can start from: one step of every composition root."""

from collections.abc import Iterable
from dataclasses import dataclass

from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.shards import Roots, Shards, roots_of
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["RunData", "open_run_data"]


@dataclass(frozen=True)
class RunData:
    downloader: Downloader
    hosted: HostedStages
    applies: ApplyBuilder
    starts: ResumePlanner
    roots: Roots


def open_run_data(
    chain: ChainFile, downloader: Downloader, stages: Iterable[int] | None = None, shards: Shards | None = None
) -> RunData:
    """`stages`: that this host has; None: all of the model. `shards`: of the run, for a host that votes; None: it has none."""
    manifest = chain.manifest
    hosted = HostedStages(range(manifest.model.stages) if stages is None else stages)
    applies = ApplyBuilder(manifest, downloader, hosted)
    roots = roots_of(shards, downloader.store, lambda: chain.head.roster)
    return RunData(downloader, hosted, applies, ResumePlanner(manifest, chain, downloader, applies, hosted), roots)
