"""Parts of a node that work for a run's optional checks. A node imports the parts of its own run's checks only.

To give a check a part, write a module with `loops(parts)` and add its row to `PARTS`.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dilocox.node.context.peer import PeerRuntime
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.shards import OwnShards
from dilocox.node.member.driver import MemberDriver
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.workers.devices import Devices
from dilocox.protocol.consensus import checks
from dilocox.protocol.member.member_io import CheckInput
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.store.blobs import BlobStore

__all__ = ["PARTS", "CorpusStore", "Loops", "Parts", "loops", "scored"]

PARTS: Mapping[str, str] = {"audits": "dilocox.node.audit.auditor"}
"""Modules by check: a node runs their `loops`. Workers measure scores, and a plugin has the part of availability."""
Loops = dict[str, Coroutine[Any, Any, None]]
"""Loops, by the name of their task."""


@dataclass(frozen=True)
class CorpusStore:
    """The run's corpus on this machine."""

    store: BlobStore
    named: bool
    """The operator named its folder: nothing is put there."""
    supplies: Downloader
    """Downloads into `store`."""


@dataclass(frozen=True)
class Parts:
    """Inputs of the parts of checks."""

    member: MemberDriver
    machine: Devices
    place: PeerRuntime
    home: Path
    """Folder of the daemon."""
    corpus: CorpusStore
    fetching_into: Callable[[BlobStore], Downloader]
    starts: ResumePlanner
    shards: OwnShards | None
    """Erasure shards of this peer; None unless the run has availability."""


def loops(parts: Parts) -> Loops:
    """Return the loops of the run's checks."""
    found: Loops = {}
    for name in checks.names(parts.member.manifest):
        if name in PARTS:
            found |= import_module(PARTS[name]).loops(parts)
    return found | parts.shards.loops(parts) if parts.shards is not None else found


def scored(found: worker.Scored) -> CheckInput:
    """Return a score that the stage workers measured as an input of the member machine."""
    from dilocox.protocol.checks.score_rules import Score
    from dilocox.protocol.checks.scores import Scored

    score = Score(found.before, found.after, found.cosine, tuple(found.sketch), tuple(found.own))
    return Scored(found.contribution, score)
