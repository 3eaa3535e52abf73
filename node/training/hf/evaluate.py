"""Held-out loss of an exported folder, computed with transformers' model class."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from dilocox.node.training.model.data import load_dataset
from dilocox.node.training.model.pipeline import cross_entropy, trained_tokens
from dilocox.protocol.run.manifest import Manifest

__all__ = ["evaluate_folder"]


@torch.no_grad()
def evaluate_folder(manifest: Manifest, folder: Path, data: Path) -> float:
    """Mean nats per token that is trained on, over the run's held-out sequences; `data`: the folder of its corpus."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs, targets = load_dataset(manifest, data).evaluation()
    batch, total = manifest.training.batch_size, 0.0
    for start in range(0, len(inputs), batch):
        part = inputs[start : start + batch]
        logits = model(part, use_cache=False).logits
        total += float(cross_entropy(logits, targets[start : start + batch]))
    return total / trained_tokens(targets)
