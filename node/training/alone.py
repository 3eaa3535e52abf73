"""One node alone, exchanging nothing: the baseline a swarm must beat. `python -m dilocox.node.training.alone RUN.toml STEPS`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dilocox.node.training.data import load_dataset
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.manifest import Manifest


def train_alone(manifest: Manifest, steps: int) -> float:
    """Held-out loss after `steps` inner steps of the run's own training settings, nats per token."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(manifest, range(manifest.model.stages), 0, 1, device)
    trainer.load_initial()
    dataset, batch = load_dataset(manifest), manifest.training.batch_size
    for step in range(steps):
        trainer.step(*dataset.batch(list(range(step * batch, (step + 1) * batch))))
    loss = trainer.evaluate(dataset)
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    manifest = Manifest.from_toml(Path(sys.argv[1]).read_text())
    json.dump({"steps": int(sys.argv[2]), "evaluation_loss": train_alone(manifest, int(sys.argv[2]))}, sys.stdout)
