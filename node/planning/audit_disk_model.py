"""Disk that a run's audits take, in bytes."""

from dilocox.protocol import limits
from dilocox.protocol.checks import audit_rules
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import phase_bytes

__all__ = ["ROUNDS_OF_MARKS", "audits", "marks", "phase"]

ROUNDS_OF_MARKS = audit_rules.WAIT + 2
"""Rounds whose states are stored at once: those that auditors may request, the open one, and the one that is written."""


def phase(manifest: Manifest, stage: int) -> int:
    """Return the bytes of a state by which a phase is audited, of one stage."""
    return phase_bytes(manifest.model, manifest.training.optimizer == "muon", stage)


def marks(manifest: Manifest, steps: int) -> int:
    """Return how many states a phase of so many steps stores: where each of its stretches begins, before a commit and after it, and
    at its end."""
    return -(-steps // audit_rules.spacing(manifest)) + 2 + audit_rules.JUMPS


def audits(manifest: Manifest, clusters: int) -> float:
    """Return the mean audits a round for which a cluster is drawn, where all have the same voting weight and are counted. A
    committee of fewer than there are others may draw one of them twice."""
    rules, others = manifest.audit, clusters - 1
    if not rules.segments or not others:
        return 0.0
    drawn = others if others <= audit_rules.AUDITORS else others * (1 - (1 - 1 / others) ** audit_rules.AUDITORS)
    return float(min(limits.AUDITS, rules.share * clusters)) * drawn / clusters
