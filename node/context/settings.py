"""Settings of a node, from its operator."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.node.context.peer import PeerSettings
from dilocox.node.hosts.cluster_link import ClusterLink
from dilocox.node.workers.environment import OuterState
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.limits.schedule import Hours

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Budget

__all__ = ["NodeSettings"]


@dataclass(frozen=True, kw_only=True)
class NodeSettings(PeerSettings):
    devices: int | None
    """Number of workers; None: one per CUDA device, else one."""
    threads: int | None
    """CPU threads per worker; None: cores divided by workers."""
    codec_cpus: tuple[int, ...]
    simulated_measurement: Path | None
    """File with the measurement that simulated evidence names, in hexadecimal."""
    collateral: Path | None
    """File with the collateral that verifiers of this machine's TDX quotes need."""
    upload_copies: int | None
    """Most uploads of each payload from here; None: no limit."""
    data: dict[str, Path]
    """Folders of corpora on this machine, by name."""
    archive: ArchivePlace | None
    """Source of what no peer serves."""
    begin: Path | None
    """A Hugging Face folder with the model that the run begins with; None: it is fetched."""
    step_seconds: float
    """An inner step takes at least this long."""
    checkpoint_seconds: float
    """Seconds between two complete checkpoints."""
    outer_state: OuterState = OuterState.STREAM
    boxes: int = 1
    """Number of hosts of the cluster that this host leads."""
    cluster: ClusterLink | None = None
    """Link of the lead host's cluster; None: this host leads."""
    interface: str | None = None
    """Network interface for tensors between the hosts of a cluster."""
    account: bytes = b""
    """EVM account that receives what this cluster earns; empty: none."""
    private: Path | None = None
    """Folder of the private corpus; None: the run's data are public."""
    budget: "Budget | None" = None
    """Privacy budget of that corpus; None: no bound."""
    gives_up_bound: bool = False
    """True to continue without a bound that its account has promised."""
    hours: Hours | None = None
    """Hours of the day in which this node takes part; None: always."""
    exit_when_finished: bool = False
    """The daemon ends with the run."""
    box_patience: float = 60.0
    """Seconds to wait for a missing host of the cluster; then the others take over its stages."""
