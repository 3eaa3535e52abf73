"""Baseline: one node alone, without exchange, which a swarm must beat.

`python -m dilocox.node.training.worker.solo_baseline RUN.toml STEPS DATA WEIGHTS`
prints a JSON line per step, and one with the loss.
DATA is the folder of the run's corpus, WEIGHTS that of imported weights, --private that of a private corpus.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dilocox.node.planning.layouts import choose
from dilocox.node.training.model.data import load_dataset, load_private
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.devices import this_machine
from dilocox.node.workers.placement import placed
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import last_built

ALONE = "alone"
"""Instead of a cluster's name."""


def train_alone(
    manifest: Manifest, steps: int, data: Path, weights: Path, follow: Callable[[int], None], private: Path | None = None
) -> float:
    """Return the held-out loss after `steps` inner steps with the run's training settings, in nats per token. `follow`:
    called after each step."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    best = choose(manifest, [this_machine(1)]).best.placement
    trainer = Trainer(placed(manifest, best.microbatches, best.recompute), Mesh(device=device))
    imported = BlobStore(weights, ours=False) if manifest.model.imported else None
    if imported is not None:
        trainer.load_frozen(imported)
    trainer.load_initial(imported if manifest.model.imported_state else None)
    dataset, batch = load_dataset(manifest, data), manifest.training.batch_size
    text = load_private(manifest, private, last_built(private), ALONE) if private is not None else dataset
    for step in range(steps):
        trainer.step(*text.batch(list(range(step * batch, (step + 1) * batch))))
        follow(step + 1)
    loss = trainer.evaluate(*dataset.evaluation())
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dilocox.node.training.worker.solo_baseline")
    parser.add_argument("run", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--private", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as a testnet's nodes; where others compute too, two threads mostly wait for each other
    manifest = Manifest.from_toml(options.run.read_text())
    follow = lambda step: print(json.dumps({"step": step}), flush=True)  # noqa: E731
    loss = train_alone(manifest, options.steps, options.data, options.weights, follow, options.private)
    print(json.dumps({"step": options.steps, "evaluation_loss": loss}), flush=True)
