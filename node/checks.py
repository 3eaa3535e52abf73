"""Parts of a node that work for a run's optional checks. A node imports the parts of its own run's checks only.

To give a check a part, write a module with `loops(parts)` and add its row to `PARTS`.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.node.exchange import Exchange
from dilocox.node.machine import Machine
from dilocox.node.participant import Participant
from dilocox.node.place import Place
from dilocox.node.starts import Starts
from dilocox.protocol import checks
from dilocox.protocol.facts import CheckInput
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile

if TYPE_CHECKING:
    from dilocox.node.restoring import Restorer
    from dilocox.node.sharing import Sharing

__all__ = ["PARTS", "Loops", "Parts", "loops", "open_sharing", "scored"]

PARTS: Mapping[str, str] = {"audits": "dilocox.node.auditor", "availability": "dilocox.node.sampling"}
"""By check: the module whose `loops` a node runs for it. Stage workers measure scores; other checks need no part of a node."""
Loops = dict[str, Coroutine[Any, Any, None]]
"""By name of the task."""


@dataclass(frozen=True)
class Parts:
    """What parts of checks are made of."""

    participant: Participant
    machine: Machine
    place: Place
    home: Path
    """Folder of the daemon."""
    data: BlobStore
    """With the run's corpus."""
    data_is_named: bool
    """The operator named the folder of the corpus: nothing is put there."""
    supplies: Exchange
    """Fetches into `data`."""
    fetching_into: Callable[[BlobStore], Exchange]
    sharing: "tuple[Sharing, Restorer] | None"
    """Of a run with availability."""


def loops(parts: Parts) -> Loops:
    """Return the loops of the run's checks."""
    found: Loops = {}
    for name in checks.names(parts.participant.manifest):
        if name in PARTS:
            found |= import_module(PARTS[name]).loops(parts)
    return found


def open_sharing(
    place: Place, manifest: Manifest, chain: ChainFile, me: str, starts: Starts, exchange: Exchange
) -> "tuple[Sharing, Restorer] | None":
    """Serve this peer's shards, and restore from shards what no peer serves; None unless the run has availability. Blocking. Raises
    ConfigError if shards cannot be made here."""
    if manifest.availability is None:
        return None
    from dilocox.node import sharing

    return sharing.open_sharing(place, manifest, chain, me, starts, exchange)


def scored(found: worker.Scored) -> CheckInput:
    """Return a score that the stage workers measured as an input of the member machine."""
    from dilocox.protocol.checks.scores import Scored
    from dilocox.protocol.scoring import Score

    score = Score(found.before, found.after, found.cosine, tuple(found.sketch), tuple(found.own))
    return Scored(found.contribution, score)
