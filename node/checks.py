"""Parts of a node that work for a run's optional checks. A node imports the parts of its own run's checks only.

To give a check a part, write a module with `loops(parts)` and add its row to `PARTS`.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.node.downloader import Downloader
from dilocox.node.machine import Machine
from dilocox.node.member_driver import MemberDriver
from dilocox.node.place import Place
from dilocox.node.starts import Starts
from dilocox.protocol import checks
from dilocox.protocol.facts import CheckInput
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile

if TYPE_CHECKING:
    from dilocox.node.sharing import Restoring

__all__ = ["PARTS", "CorpusStore", "Loops", "Parts", "loops", "open_restoring", "scored"]

PARTS: Mapping[str, str] = {"audits": "dilocox.node.auditor", "availability": "dilocox.node.sampling"}
"""Modules by check: a node runs their `loops`. Workers measure scores; other checks need no part of a node."""
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
    machine: Machine
    place: Place
    home: Path
    """Folder of the daemon."""
    corpus: CorpusStore
    fetching_into: Callable[[BlobStore], Downloader]
    starts: Starts
    restoring: "Restoring | None"
    """Source of blobs from shards; None unless the run has availability."""


def loops(parts: Parts) -> Loops:
    """Return the loops of the run's checks."""
    found: Loops = {}
    for name in checks.names(parts.member.manifest):
        if name in PARTS:
            found |= import_module(PARTS[name]).loops(parts)
    return found


def open_restoring(place: Place, chain: ChainFile) -> "Restoring | None":
    """Serve this peer's shards, and restore from shards what no peer serves; None unless the run has availability. Blocking. Raises
    ConfigError if shards cannot be made here."""
    if chain.manifest.availability is None:
        return None
    from dilocox.node import sharing

    return sharing.open_restoring(place, chain)


def scored(found: worker.Scored) -> CheckInput:
    """Return a score that the stage workers measured as an input of the member machine."""
    from dilocox.protocol.checks.scores import Scored
    from dilocox.protocol.scoring import Score

    score = Score(found.before, found.after, found.cosine, tuple(found.sketch), tuple(found.own))
    return Scored(found.contribution, score)
