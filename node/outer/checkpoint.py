"""Checkpoints: a stage's private state at the end of a local phase, from which a killed node resumes.

    <stage>/<round>/outer.safetensors   error feedback after encoding, the codec's warm starts; where complete, the anchor, which
                                        the live parameters equal at a boundary
    <stage>/<round>/inner.safetensors   where complete: the inner optimizer's tensors, by parameter name
    <stage>/<round>/boundary.json       written last, behind its SHA-256: payload, base state, counters; else nothing counts
    <stage>/<round>/durable             all of it has reached the disk

Between complete ones a node writes checkpoints without anchor and inner tensors: a resume from those continues from
Θ, with the inner tensors of the last complete one. The committed state is no part of it: it is a blob, named by
`base_state`.

Nothing here waits for the disk but `make_durable`. After the end of a process the page cache has its files. After a power
loss only durable checkpoints count: others name the boot of the kernel that wrote them, and that is another one.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dilocox.node.outer.state import StageState
from dilocox.node.outer.tensor_file import save_tensors
from dilocox.protocol.crypto import sha256
from dilocox.transport.store.files import fsync_directory, quarantine, read_checked, write_atomically

__all__ = [
    "BoundaryMeta",
    "boundaries",
    "complete_age",
    "load_inner",
    "load_outer",
    "make_durable",
    "save_inner",
    "save_outer",
    "seal_boundary",
]

KEEP = 2
"""Boundaries kept per stage: workers of one node may be one apart when they are killed. Beside them, what they need of an older."""
OUTER, INNER = "outer.safetensors", "inner.safetensors"
DURABLE = "durable"
BOOT = "boot"
"""Key of the boot's id in boundary.json, beside the fields of BoundaryMeta."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Source: random(4). Containers have their host's."""


@dataclass(frozen=True)
class BoundaryMeta:
    """Facts that a node needs to announce this phase again, byte for byte, and to continue from it."""

    round: int
    inner_steps: int
    tokens: int
    loss: float
    samples_read: int
    joined: int
    """The `joined` of the lease that samples_read counts in."""
    optimizer_steps: int
    rank_or_k: int
    """Rank or k of the codec."""
    head: str = ""
    """Digest of the commit that opened the round: the boundary is of its chain."""
    base_state: str = ""
    """Digest of the stage's state the round started from, hexadecimal; so are the others. Empty until it is encoded."""
    payload: str = ""
    payload_size: int = 0
    norm: float = 0.0
    effective_rank: float = 0.0
    error: float = 0.0
    norms: str = ""
    """Norm codes of the stage's tensors, hexadecimal."""
    marks: str = ""
    """The stage's part of the audit checkpoints, hexadecimal; empty in a run without audits."""
    complete: bool = False
    """True if it has the inner tensors and the anchor."""
    steps_within: int = 0
    """Inner steps whose work the feedback took in with this boundary: also of phases before it that never ended."""
    noise: float = 0.0
    """Noise in these steps: standard deviation over the bound on a sequence's gradient; 0: none."""
    corpus: str = ""
    """Digest of the private corpus, hexadecimal; empty: the run's."""


def _folder(root: Path, stage: int, round: int) -> Path:
    return root / f"{stage:04d}" / f"{round:08d}"


def this_boot() -> str:
    """Return the id of the kernel's boot; empty where there is none: then only durable checkpoints count."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def boundaries(root: Path, stage: int) -> dict[int, BoundaryMeta]:
    """Return the checkpoints of a stage that count, by round. A damaged one, or of another version, does not."""
    found: dict[int, BoundaryMeta] = {}
    for path in sorted((root / f"{stage:04d}").glob("*/boundary.json")):
        meta = _sealed(path.parent) if _opens(path.parent / OUTER) else None
        if meta is not None:
            found[meta.round] = meta
    return found


def _sealed(folder: Path) -> BoundaryMeta | None:
    """Return the description of a checkpoint; None if it is missing, damaged, or lost its files with the power."""
    read = read_checked(folder / "boundary.json", _meta)
    if read is None:
        return None
    meta, boot = read
    return meta if (boot and boot == this_boot()) or (folder / DURABLE).exists() else None


def _meta(raw: bytes) -> tuple[BoundaryMeta, str]:
    """Return the description and the id of the boot. Raises ValueError unless these are the bytes that were written."""
    digest, _, text = raw.partition(b"\n")
    if digest != sha256(text).hex().encode():
        raise ValueError("its bytes do not have its digest")
    try:
        said = json.loads(text)
        return BoundaryMeta(**{key: value for key, value in said.items() if key != BOOT}), said[BOOT]
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is of another version: {error}") from error


def _opens(path: Path) -> bool:
    """Whether the tensors are there, all of them. A file that is cut short, or none, is set aside: the workers would end over it at
    every start."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except FileNotFoundError:
        return False
    except SafetensorError as error:
        quarantine(path, str(error))
        return False


def _described(meta: BoundaryMeta) -> bytes:
    text = json.dumps({**asdict(meta), BOOT: this_boot()}).encode()
    return sha256(text).hex().encode() + b"\n" + text


def save_inner(root: Path, stage: int, round: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the inner tensors: the first of a checkpoint's files, if it is complete."""
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, _begun(root, stage, round) / INNER)


def save_outer(root: Path, state: StageState, round: int, complete: bool = True) -> None:
    """Write error feedback and warm starts; `complete`: after `save_inner`, and with the anchor."""
    tensors = {"feedback": state.feedback, **{f"warm.{name}": q.contiguous() for name, q in state.warm.items()}}
    folder = _folder(root, state.stage, round) if complete else _begun(root, state.stage, round)
    save_tensors(tensors | ({"anchor": state.anchor} if complete else {}), folder / OUTER)


def _begun(root: Path, stage: int, round: int) -> Path:
    """Return the folder of a checkpoint, without files of an earlier incarnation."""
    folder = _folder(root, stage, round)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def seal_boundary(root: Path, stage: int, meta: BoundaryMeta) -> None:
    """Make the checkpoint current, and delete older ones, and those of later rounds, which belong to a chain that the run's
    owner has given up. Waits for no disk."""
    folder = _folder(root, stage, meta.round)
    write_atomically(folder / "boundary.json", _described(meta), waits=False)
    here = sorted(folder.parent.iterdir())
    later = [path for path in here if path > folder and (path / "boundary.json").exists()]  # what has none may be being written
    before = [path for path in here if path <= folder]
    sealed = [path for path in before if (path / "boundary.json").exists()]  # all others were begun by an earlier incarnation
    older = sealed[: 1 - KEEP]
    complete = [path for path in older if (path / INNER).exists()]
    kept = {*sealed[-KEEP:], *complete[-1:], *[path for path in complete if (path / DURABLE).exists()][-1:]}
    for old in [*later, *(path for path in before if path not in kept)]:
        shutil.rmtree(old, ignore_errors=True)


def make_durable(root: Path, stage: int, round: int) -> None:
    """Wait until a sealed checkpoint is on the disk, then add DURABLE. Skip a deleted one. Blocking: fsyncs."""
    folder = _folder(root, stage, round)
    with suppress(FileNotFoundError):
        for path in (*folder.glob("*.safetensors"), folder / "boundary.json"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_directory(folder)
        fsync_directory(folder.parent)
        write_atomically(folder / DURABLE, b"")


def complete_age(root: Path, stage: int) -> float:
    """Return the seconds since the newest complete checkpoint of a stage; infinite without one."""
    times = [(path.parent / "boundary.json").stat().st_mtime for path in _complete(root / f"{stage:04d}")]
    return max(0.0, time.time() - max(times)) if times else math.inf


def _complete(stage: Path) -> list[Path]:
    return [path for path in stage.glob(f"*/{INNER}") if _sealed(path.parent) is not None and _opens(path)]


def load_inner(root: Path, stage: int, round: int) -> dict[str, Tensor]:
    """Return the tensors of this checkpoint, or of the last complete one before it; empty without one."""
    last = _folder(root, stage, round)
    path = max((path for path in _complete(last.parent) if path.parent <= last), default=None)
    return load_file(path) if path is not None else {}


def load_outer(root: Path, state: StageState, round: int) -> None:
    """Feedback and warm starts; the anchor too, where it is there."""
    tensors = load_file(_folder(root, state.stage, round) / OUTER)
    state.feedback.copy_(tensors.pop("feedback"))
    if "anchor" in tensors:
        state.anchor.copy_(tensors.pop("anchor"))
    state.warm = {name.removeprefix("warm."): torch.clone(tensor) for name, tensor in tensors.items()}
