"""Environment variables of workers, set by the daemon. The daemon imports it, so it imports no torch."""

import os
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

__all__ = ["CHECKPOINT_SECONDS", "RENDEZVOUS", "STORE_PORT", "STORE_SOCKET", "WORKER", "OuterState", "WorkerSettings"]

WORKER = "dilocox-worker"
"""Name of the processes in `ps` and `top`; Linux stores 15 characters."""
RENDEZVOUS = "DILOCOX_RENDEZVOUS"
"""Path of the file by which the workers of one generation find each other; beside it torch's RANK, LOCAL_RANK and WORLD_SIZE."""
STORE_PORT = "DILOCOX_STORE_PORT"
"""Loopback port of the first worker's store, in a cluster of several hosts."""
STORE_SOCKET = "DILOCOX_STORE_SOCKET"
"""Number of the listening socket that this worker inherits."""
_PREFIX = "DILOCOX_WORKER_"


class OuterState(StrEnum):
    """Device of the outer state (outer/passage.py), on a host with GPUs."""

    HOST = "host"
    STREAM = "stream"
    DEVICE = "device"


CHECKPOINT_SECONDS = 300.0
"""Seconds between two complete checkpoints, if the operator names none."""


@dataclass(frozen=True)
class WorkerSettings:
    socket: str
    """Path of the daemon's Unix socket."""
    manifest: Path
    """The manifest's canonical bytes."""
    blobs: Path
    stages: Path
    """Folder of the checkpoints."""
    cluster: str
    devices: str
    """`cpu` or `cuda`."""
    copies: int
    """Copies of the pipeline: number of workers per stage."""
    threads: int
    codec_cpus: tuple[int, ...]
    """CPUs for the background thread; empty: any."""
    data: Path
    """Folder of the run's corpus."""
    step_seconds: float
    """An inner step takes at least this long; 0: as long as it takes."""
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    """Seconds between two complete checkpoints."""
    outer_state: OuterState = OuterState.STREAM
    private: Path | None = None
    """Folder of the private corpus; None: the run's data are public."""
    private_digest: str = ""
    """Digest of the checked private corpus: a later build does not count."""
    clip: float = 0.0
    """Largest norm of the gradient of one of its sequences …"""
    noise: float = 0.0
    """Standard deviation of the noise relative to the clip; 0: neither noise nor clip."""
    microbatches: int = 1
    """Microbatches of an inner step, of all copies, where the run leaves them to nodes."""
    recompute: bool = False
    """True if activations are computed again, likewise."""

    def environment(self) -> dict[str, str]:
        values = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        values["codec_cpus"] = ",".join(map(str, self.codec_cpus))
        values["private"] = str(self.private or "")
        return {_PREFIX + name.upper(): value for name, value in values.items()}

    @classmethod
    def from_environment(cls) -> "WorkerSettings":
        def get(name: str) -> str:
            return os.environ[_PREFIX + name.upper()]

        return cls(
            socket=get("socket"),
            manifest=Path(get("manifest")),
            blobs=Path(get("blobs")),
            stages=Path(get("stages")),
            cluster=get("cluster"),
            devices=get("devices"),
            copies=int(get("copies")),
            microbatches=int(get("microbatches")),
            recompute=get("recompute") == str(True),
            threads=int(get("threads")),
            codec_cpus=tuple(int(cpu) for cpu in get("codec_cpus").split(",") if cpu),
            data=Path(get("data")),
            step_seconds=float(get("step_seconds")),
            checkpoint_seconds=float(get("checkpoint_seconds")),
            outer_state=OuterState(get("outer_state")),
            private=Path(get("private")) if get("private") else None,
            private_digest=get("private_digest"),
            clip=float(get("clip")),
            noise=float(get("noise")),
        )
