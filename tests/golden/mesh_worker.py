"""A worker of a mesh, as test_pipeline.py has several of."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dilocox.node.training.model.data import UNTRAINED, load_dataset
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.rendezvous import join_generation
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore

__all__ = ["work"]


class Kept:
    """Bytes that autograd stores, storage by storage."""

    weights: set[int]
    storages: dict[int, tuple[int, int]]
    peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.at = tensor, tensor.untyped_storage().data_ptr()
        if self.at not in Kept.weights:
            users, size = Kept.storages.get(self.at, (0, tensor.untyped_storage().nbytes()))
            Kept.storages[self.at] = users + 1, size
            Kept.peak = max(Kept.peak, sum(size for _, size in Kept.storages.values()))

    def __del__(self) -> None:
        if self.at not in Kept.weights:
            users, size = Kept.storages.pop(self.at)
            if users > 1:
                Kept.storages[self.at] = users - 1, size


def work(meeting: Mapping[str, str], manifest: Path, text: Path, copies: int, masked: bool) -> dict[str, Any]:
    os.environ.update(meeting)
    join_generation(torch.device("cpu"))
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    run = Manifest.from_canonical(manifest.read_bytes())
    mesh = Mesh(rank, workers, copies)
    trainer = Trainer(run, mesh)
    trainer.load_frozen(BlobStore(text))
    trainer.load_initial()
    data = load_dataset(run, text)

    def held() -> dict[int, str]:
        """Return a digest of this worker's training state, by stage."""
        live = {
            number: b"".join(tensor.numpy().tobytes() for tensor in trainer.live(stage))
            for number, stage in trainer.live_stages()
        }
        return {number: hashlib.sha256(bits).hexdigest() for number, bits in live.items()}

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = data.batch([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
        for row in range(len(targets) if masked else 0):
            targets[row, : (i + 5 * row) % 15] = UNTRAINED  # of each row another share
        return inputs, targets

    results = [trainer.step(*batch(i), flags=lambda: [1.0, rank]) for i in range(4)]
    trained = held()
    trainer.end_phase(1, restart=False)
    evaluation = trainer.evaluate_committed(data)
    Kept.weights = {t.untyped_storage().data_ptr() for _, stage in trainer.live_stages() for t in trainer.live(stage)}
    Kept.storages = {}
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        inputs, targets = data.batch([16, 17, 18, 19])
        trainer.pipeline.step(mesh.share(inputs), mesh.share(targets), targets.numel())
    told = [[each.loss, each.gradient_norm, *each.flags] for each in results] + [[evaluation]]
    stages = {str(stage): [trained[stage], digest] for stage, digest in held().items()}
    dist.destroy_process_group()
    return {"told": told, "held": stages, "copy": mesh.copy, "states": len(trainer.states), "peak": Kept.peak}
