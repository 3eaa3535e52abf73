"""Messages between the daemon and its audit process. Both import it, so it imports no torch."""

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
    """Folder of this node's blobs of the run: weights under adapters."""
    first: list[str]
    """Digests of the state before, by stage."""
    last: list[str]
    """Announced state after the steps."""
    optimizer_steps: int
    positions: list[int]
    """Samples of the inner steps in between."""
    cuda: bool
    machine: str
    """Kind of machine of the audited cluster."""
    threads: int
    workers: int
    """Number of its workers."""


@dataclass(frozen=True)
class Found:
    verdict: str
    """Name of an AuditVerdict."""
    distance: float
