"""Optional checks of a run. The core (rules, tally, chain, head, member) iterates over `of(manifest)` and knows none of
them.

To add a check, write a module in protocol/checks with a subclass of `Check` named `CHECK`, and add its row to `WANTED`,
in its order. Wire fields that only this check uses get a row in `FIELDS`; a run without the check then rejects
statements that set them.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dilocox.protocol.consensus.check_interface import Check
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

if TYPE_CHECKING:
    from dilocox.protocol.consensus.head import Head

__all__ = ["FIELDS", "WANTED", "fault", "names", "of"]

WANTED: Mapping[str, Callable[[Manifest], bool]] = {
    "audits": lambda manifest: manifest.audit.segments > 0,
    "scores": lambda manifest: manifest.scoring.voters > 0,
    "bias": lambda manifest: manifest.scoring.voters > 0 and not manifest.data.private,
    "availability": lambda manifest: manifest.availability is not None,
    "merit": lambda manifest: manifest.settlement is not None,
}
"""Conditions under which a run has a check, by the name of its module. The order is part of the rules: a cluster that one
check convicts has no vote in the checks after it."""

FIELDS: Mapping[pb.Kind, Mapping[str, str]] = {
    pb.KIND_CLAIM: {"account": "merit"},
    pb.KIND_CONTRIBUTION: {"audit": "audits", "shares": "availability"},
    pb.KIND_RECEIPT: {"measured": "scores", "audits": "audits", "lacking": "availability"},
}
"""Checks without which a field is empty, by kind of statement and field."""


def names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the run's checks, in the order of their turns."""
    return tuple(name for name, wanted in WANTED.items() if wanted(manifest))


def of(manifest: Manifest) -> tuple[Check, ...]:
    """Return the run's checks, in the order of their turns. Modules of other checks are not imported."""
    return _loaded(names(manifest))


@cache
def _loaded(names: tuple[str, ...]) -> tuple[Check, ...]:
    return tuple(import_module(f"dilocox.protocol.checks.{name}").CHECK for name in names)


def fault(manifest: Manifest, head: "Head", statement: Statement[Any]) -> str:
    """Return why a claim, contribution or vote is malformed by the run's checks; empty: it is not."""
    active = of(manifest)
    for field, name in FIELDS.get(statement.kind, {}).items():
        if getattr(statement.body, field) and name not in (check.name for check in active):
            return f"its field {field} belongs to {name}, a check that this run does not use: leave it empty"
    return next((why for check in active if (why := check.fault(manifest, head, statement))), "")
