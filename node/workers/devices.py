"""Devices of this host: number and memory, and host memory. Imports no torch."""

import os
import re
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import several

__all__ = ["Devices", "Lack", "available_bytes", "cuda_devices", "lacking_driver", "this_machine"]

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
"""The driver's command: MiB of each card, a line each."""
PCI = Path("/sys/bus/pci/devices")
MEMORY = Path("/proc/meminfo")
GRANTED = Path("/sys/fs/cgroup/memory.max")
"""Memory limit of a container: a number of bytes, or `max`."""


@dataclass(frozen=True)
class Devices:
    devices: int
    """Number of workers: one per GPU, or the operator's number on CPUs."""
    cuda: bool = False
    device_bytes: int = 0
    """Memory of the smallest GPU in bytes; 0: unknown."""
    host_bytes: int = 0
    """Memory of all workers on CPUs in bytes; 0: unknown."""


def this_machine(wanted: int | None) -> Devices:
    """`wanted`: stage workers; None: one for each GPU, or one. Raises ConfigError where it cannot be had.
    Blocking: asks the driver."""
    cuda = cuda_devices()
    if wanted and cuda and wanted > cuda:
        raise ConfigError(f"--devices {wanted}, but this machine has {several(cuda, 'CUDA device')}")
    return Devices(wanted or cuda or 1, bool(cuda), _device_bytes() if cuda else 0, _host_bytes())


def cuda_devices() -> int:
    """Return the number of CUDA devices, without loading torch. NVIDIA's driver lists a folder per card; CUDA_VISIBLE_DEVICES
    narrows that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    cards = Path("/proc/driver/nvidia/gpus")
    return len(list(cards.iterdir())) if cards.is_dir() else 0


@dataclass(frozen=True)
class Lack:
    """Why a GPU of this machine would not train."""

    says: str
    do: str
    stops: bool
    """A node would not start at all."""


def lacking_driver() -> Lack | None:
    """Return why NVIDIA GPUs that are here cannot be used; None: they can, or there are none."""
    if cuda_devices():
        if _torch_is_for_cpus():
            return Lack(
                "this machine has NVIDIA GPUs, and the torch that is installed is a CPU build",
                "install the CUDA build (`pip install torch` from PyPI), or set CUDA_VISIBLE_DEVICES= to train on CPUs",
                stops=True,
            )
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is None and _has_nvidia_card():
        return Lack(
            "this machine has an NVIDIA GPU without its driver: CPUs would train", "install NVIDIA's driver", stops=False
        )
    return None


def _torch_is_for_cpus() -> bool:
    """Read what torch was built for, without loading it."""
    found = find_spec("torch")
    try:
        text = (Path(found.origin).with_name("version.py")).read_text() if found is not None and found.origin else ""
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None", text, re.MULTILINE) is not None


def _has_nvidia_card() -> bool:
    """Return whether a display or 3D controller of NVIDIA is on the PCI bus."""
    for device in PCI.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _device_bytes() -> int:
    try:
        found = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=30).stdout
        cards = {int(line) << 20 for line in found.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return 0 if hidden and len(cards) > 1 else min(cards, default=0)  # which of them are ours it does not say


def _host_bytes() -> int:
    """Return the machine's memory, or the container's limit."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    try:
        return min(whole, int(GRANTED.read_text()))
    except (OSError, ValueError):
        return whole


def available_bytes() -> int | None:
    """Return the free memory of this machine; None: the system does not report it."""
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
