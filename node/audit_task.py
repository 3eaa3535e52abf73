"""What the daemon asks the process that audits, and hears from it. Free of torch: both look."""

from dataclasses import dataclass

__all__ = ["Found", "Task"]


@dataclass(frozen=True)
class Task:
    manifest: str
    """Path of its canonical bytes."""
    data: str
    """Folder of the run's corpus."""
    blobs: str
    """Folder of the states …"""
    own_blobs: str
    """… and of what this node has of the run: weights that adapters are added to."""
    first: list[str]
    """Digests of the state before, by stage."""
    last: list[str]
    """And of what its author says it became."""
    optimizer_steps: int
    positions: list[int]
    """Samples of the inner steps in between."""
    cuda: bool
    machine: str
    """What its author trained on …"""
    threads: int
    workers: int
    """… and with."""


@dataclass(frozen=True)
class Found:
    verdict: str
    """Name of an AuditVerdict."""
    distance: float
