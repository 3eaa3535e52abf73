"""What this box has for its cluster: devices, and memory on them and beside them. Free of torch."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import several

__all__ = ["Machine", "available_bytes", "this_machine"]

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
"""The driver's own command: MiB of each card, a line each."""
MEMORY = Path("/proc/meminfo")
GRANTED = Path("/sys/fs/cgroup/memory.max")
"""What a container may use: a number of bytes, or `max`."""


@dataclass(frozen=True)
class Machine:
    devices: int
    """Stage workers that it can hold: one for each GPU, or as many as its operator said on CPUs."""
    cuda: bool = False
    device_bytes: int = 0
    """Of the GPU with the least; 0: not known."""
    host_bytes: int = 0
    """Which workers share that train on CPUs; 0: not known."""


def this_machine(wanted: int | None) -> Machine:
    """`wanted`: stage workers; None: one for each GPU, or one. Raises ConfigError where it cannot be had.
    Blocking: asks the driver."""
    cuda = _cuda_devices()
    if wanted and cuda and wanted > cuda:
        raise ConfigError(f"--devices {wanted}, but this machine has {several(cuda, 'CUDA device')}")
    return Machine(wanted or cuda or 1, bool(cuda), _device_bytes() if cuda else 0, _host_bytes())


def _cuda_devices() -> int:
    """CUDA devices, without loading torch: NVIDIA's driver lists one folder per card; CUDA_VISIBLE_DEVICES narrows it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    cards = Path("/proc/driver/nvidia/gpus")
    return len(list(cards.iterdir())) if cards.is_dir() else 0


def _device_bytes() -> int:
    try:
        found = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=30).stdout
        cards = {int(line) << 20 for line in found.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return 0 if hidden and len(cards) > 1 else min(cards, default=0)  # which of them are ours it does not say


def _host_bytes() -> int:
    """Of the machine, or as much of it as our container was granted."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    try:
        return min(whole, int(GRANTED.read_text()))
    except (OSError, ValueError):
        return whole


def available_bytes() -> int | None:
    """Memory of this machine that nobody uses now; None: the system does not say."""
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
