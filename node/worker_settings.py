"""What the daemon hands to its stage workers, as environment variables. Free of torch: the daemon imports it too."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["RENDEZVOUS", "WorkerSettings", "tile"]

RENDEZVOUS = "DILOCOX_RENDEZVOUS"
"""Path of the file by which the workers of one generation find each other; beside it torch's RANK, LOCAL_RANK and WORLD_SIZE."""
_PREFIX = "DILOCOX_WORKER_"


@dataclass(frozen=True)
class WorkerSettings:
    socket: str
    """Path of the daemon's Unix socket."""
    manifest: Path
    """The manifest's canonical bytes."""
    blobs: Path
    stages: Path
    """Where boundary checkpoints lie."""
    cluster: str
    devices: str
    """`cpu` or `cuda`."""
    copies: int
    """Of the pipeline: so many workers train each stage."""
    threads: int
    codec_cpus: tuple[int, ...]
    """CPUs for the background thread; empty: any."""
    data: Path
    """Where the run's corpus lies."""
    step_seconds: float
    """An inner step takes at least this long; 0: as long as it takes."""

    def environment(self) -> dict[str, str]:
        values = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        values["codec_cpus"] = ",".join(map(str, self.codec_cpus))
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
            threads=int(get("threads")),
            codec_cpus=tuple(int(cpu) for cpu in get("codec_cpus").split(",") if cpu),
            data=Path(get("data")),
            step_seconds=float(get("step_seconds")),
        )


def tile(workers: int, stages: int, microbatches: int) -> tuple[int, int]:
    """(workers of a pipeline, copies of it) that use the most of so many workers, and of these the longest pipeline: it needs the
    least memory of each. torch's 1F1B schedule needs at least one microbatch per worker; copies share them out."""
    tilings = [
        (length, copies)
        for length in range(1, min(workers, stages, microbatches) + 1)
        for copies in range(1, workers // length + 1)
        if microbatches % copies == 0 and microbatches // copies >= length
    ]
    return max(tilings, key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
