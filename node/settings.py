"""What a node's operator said."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.node.boxes.link import ClusterLink
from dilocox.node.place import PeerSettings
from dilocox.node.worker_settings import OuterState
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.hours import Hours

if TYPE_CHECKING:
    from dilocox.node.privacy import Budget

__all__ = ["NodeSettings"]


@dataclass(frozen=True, kw_only=True)
class NodeSettings(PeerSettings):
    devices: int | None
    """How many stage workers; None: one per CUDA device, else one."""
    threads: int | None
    """CPU threads per worker; None: cores divided by workers."""
    codec_cpus: tuple[int, ...]
    simulated_measurement: Path | None
    """File with the measurement that simulated evidence names, in hexadecimal."""
    collateral: Path | None
    """File with the collateral that verifiers of this machine's TDX quotes need."""
    upload_copies: int | None
    """How often each payload may leave this machine; None: as often as it is asked for."""
    data: dict[str, Path]
    """Where corpora lie on this machine, by name."""
    archive: ArchivePlace | None
    """Asked for what no peer serves."""
    begin: Path | None
    """A Hugging Face folder with the model that the run begins with; None: it is fetched."""
    step_seconds: float
    """An inner step takes at least this long."""
    checkpoint_every: int
    """Boundaries are written complete in rounds that this divides."""
    outer_state: OuterState = OuterState.HOST
    boxes: int = 1
    """Of our cluster, which we lead."""
    cluster: ClusterLink | None = None
    """Of the cluster whose box we are; None: our own."""
    interface: str | None = None
    """On which the boxes of a cluster exchange tensors."""
    account: bytes = b""
    """EVM account to which what our cluster earns is paid; empty: to nobody."""
    private: Path | None = None
    """Where our own corpus lies; None: the run's data are what we train on."""
    budget: "Budget | None" = None
    """What that may give away; None: anything …"""
    gives_up_bound: bool = False
    """… also where its account has promised a bound."""
    hours: Hours | None = None
    """Of the day, in which this node takes part; None: always."""
    exit_when_finished: bool = False
    """The daemon ends with the run."""
    box_patience: float = 60.0
    """Seconds for which a box of our cluster that is gone is waited for; then the others share out its stages."""
