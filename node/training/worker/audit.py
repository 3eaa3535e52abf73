"""Audit process: computes the inner steps between two states of another cluster's phase again, at low priority.

`python -P -m dilocox.node.training.worker.audit` reads a JSON object (`Task`) from standard input, and writes another one
(`Found`). If this machine cannot do it, the process ends with an error, which is no finding.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.node.audit.messages import Found, Task
from dilocox.node.training.model.data import load_dataset
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.audit_checkpoints import LIVE, load_state, machine, parts, stage_state
from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.process.parent_pipe import exit_with_parent
from dilocox.transport.store.blobs import BlobStore

__all__ = ["advance", "carry_out", "compare", "distance", "threads_of"]

NICENESS = 19
"""Training goes first, and everything else."""
Batch = tuple[Tensor, Tensor]


def advance(trainer: Trainer, states: Sequence[Tensor], optimizer_steps: int, batches: Iterable[Batch]) -> list[Tensor]:
    """Return the states after the inner steps on these batches, by stage."""
    for (_, stage), flat in zip(trainer.live_stages(), states, strict=True):
        load_state(trainer, stage, flat)
    trainer.optimizer.steps = optimizer_steps
    for inputs, targets in batches:
        trainer.step(inputs, targets)
    return [stage_state(trainer, stage) for _, stage in trainer.live_stages()]


def is_state(trainer: Trainer, states: Sequence[Tensor]) -> bool:
    """Return whether the states can be trained on: unusable ones would end this process, which is no finding."""
    for (_, stage), flat in zip(trainer.live_stages(), states, strict=True):
        at = 0
        for parameter, kind, elements in parts(trainer, stage):
            counts = kind != LIVE and trainer.optimizer.kinds(parameter)[kind]
            if not bool(flat[at : at + elements].isfinite().all()) or (counts and float(flat[at]) < 0):
                return False
            at += elements
    return True


@dataclass
class Way:
    """Sums of squares over tensors of one kind."""

    off: float = 0.0
    """Distance of the announced state from the computed one."""
    far: float = 0.0
    """Distance of the computed state from the first one; for moments, from zero."""

    @property
    def share(self) -> float:
        share = math.sqrt(self.off / self.far) if self.far else (math.inf if self.off else 0.0)
        return share if share == share else math.inf


def distance(trainer: Trainer, first: Sequence[Tensor], computed: Sequence[Tensor], said: Sequence[Tensor]) -> float:
    """Return the largest distance of announced and computed states over parameters and moments, relative to the way of the
    parameters, and to the moments. NaN counts as infinite."""
    ways: dict[str, Way] = {}
    for (_, stage), *flats in zip(trainer.live_stages(), first, computed, said, strict=True):
        at = 0
        for _, kind, elements in parts(trainer, stage):
            began, ours, theirs = (flat[at : at + elements].double() for flat in flats)
            at += elements
            way = ways.setdefault(kind, Way())
            way.off += float((theirs - ours).square().sum())
            way.far += float((ours - began if kind == LIVE else ours).square().sum())
    return min(limits.AUDIT_DISTANCE, max(way.share for way in ways.values()))


def compare(
    trainer: Trainer, first: Sequence[Tensor], computed: Sequence[Tensor], said: Sequence[Tensor], alike: bool
) -> tuple[pb.AuditVerdict, float]:
    """`alike`: the bits must be the same, on a machine of the same kind."""
    if all(map(torch.equal, map(_bits, computed), map(_bits, said))):
        return pb.AUDIT_EQUAL, 0.0
    off = distance(trainer, first, computed, said)
    near = not alike and off <= trainer.manifest.audit.largest_distance
    return (pb.AUDIT_NEAR if near else pb.AUDIT_DIFFERS), off


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


def carry_out(task: Task) -> Found:
    """Run the audit, with torch.distributed initialised for this process alone."""
    manifest = Manifest.from_canonical(Path(task.manifest).read_bytes())
    device = torch.device("cuda" if task.cuda else "cpu")
    trainer = Trainer(manifest, Mesh(device=device))
    trainer.load_frozen(BlobStore(Path(task.own_blobs), ours=False))
    store, batch = BlobStore(Path(task.blobs), ours=False), manifest.training.batch_size
    first, last = (
        [torch.frombuffer(bytearray(store.view(bytes.fromhex(d))), dtype=torch.float32) for d in digests]
        for digests in (task.first, task.last)
    )
    if not all(is_state(trainer, states) for states in (first, last)):
        return Found(pb.AuditVerdict.Name(pb.AUDIT_MALFORMED), 0.0)
    dataset = load_dataset(manifest, Path(task.data))
    batches = (dataset.batch(task.positions[at : at + batch]) for at in range(0, len(task.positions), batch))
    computed = advance(trainer, first, task.optimizer_steps, batches)
    alike = device.type == "cpu" and task.machine == machine(device) and task.workers == 1
    alike = alike and task.threads == torch.get_num_threads()
    verdict, off = compare(trainer, first, computed, last, alike)
    return Found(pb.AuditVerdict.Name(verdict), off)


def threads_of(task: Task) -> int:
    """Return the author's number of threads, if this machine has so many cores: then the bits may be equal."""
    return task.threads if 0 < task.threads <= (os.cpu_count() or 1) else 1


def main() -> None:
    exit_with_parent()
    os.nice(NICENESS)
    task = Task(**json.load(sys.stdin))
    torch.set_num_threads(threads_of(task))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    found = carry_out(task)
    dist.destroy_process_group()
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
