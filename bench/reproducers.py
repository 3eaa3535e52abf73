"""One process of a row of `python -m bench.reproduce` that exchanges in every step, over gloo on the row's links.

    allreduce   torch's DistributedDataParallel, with gradients in 16 bits
    cocktail    CocktailSGD: a shared seed draws a tenth of the gradient in each step; the largest fifth of it is sent in Int4,
                and gathered from all ranks while the next step is computed

It reports the seconds of each of its steps. A step computes for at least the set time.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from bench.baselines import CocktailSGD, decoded_message
from dilocox.node.training.model.data import load_dataset
from dilocox.node.training.model.inner import InnerOptimizer
from dilocox.node.training.model.model import Chain, build_chain, initial_values
from dilocox.protocol.run.manifest import Manifest

__all__ = ["main"]

ALONE = 5
"""Steps without an exchange, to see what computing takes."""


class Rank:
    """One data-parallel copy of the model."""

    def __init__(self, run: Manifest, data: Path, step_seconds: float) -> None:
        self.run, self.dataset, self._least = run, load_dataset(run, data), step_seconds
        self.rank, self.ranks, self._position = dist.get_rank(), dist.get_world_size(), 0
        self.chain: Chain = build_chain(run.model, list(range(run.model.stages)), torch.device("cpu"))
        for stage in self.chain:
            for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
                for offset, values in initial_values(spec, run.model.seed):
                    parameter.data.view(-1)[offset : offset + len(values)] = values
        self.optimizer = InnerOptimizer(run, list(self.chain))
        self.parameters = [parameter for stage in self.chain for parameter in stage.tensors()]

    def compute(self, model: nn.Module) -> None:
        """Compute forward and backward of this rank's batch, after a pause that extends computing to the set time."""
        time.sleep(self.rest)
        batch = self.run.training.batch_size
        first = self._position + self.rank * batch
        self._position += self.ranks * batch
        inputs, targets = self.dataset.batch(list(range(first, first + batch)))
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()

    rest = 0.0

    def calibrate(self) -> float:
        """Measure the seconds of computing here; set the pause."""
        times = []
        for _ in range(ALONE):
            began = time.monotonic()
            self.compute(self.chain)
            times.append(time.monotonic() - began)
            for parameter in self.parameters:
                parameter.grad = None
        computing = sorted(times)[ALONE // 2]
        self.rest = max(0.0, self._least - computing)
        return computing

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.run.training.gradient_clip)
        self.optimizer.step()


def allreduce(rank: Rank) -> Callable[[], int]:
    model = DistributedDataParallel(rank.chain)
    model.register_comm_hook(None, fp16_compress_hook)

    def step() -> int:
        rank.compute(model)
        rank.update()
        return sum(2 * parameter.numel() for parameter in rank.parameters)

    return step


class Cocktail:
    """The message of a step is gathered while the next step is computed, and its mean applied after that."""

    def __init__(self, rank: Rank, share: float) -> None:
        self._rank, self._share = rank, share
        self._size = sum(parameter.numel() for parameter in rank.parameters)
        self._feedback = torch.zeros(self._size)
        self._generator = torch.Generator().manual_seed(rank.run.model.seed)
        self._sender = ThreadPoolExecutor(1)
        self._flying: Future[Tensor] | None = None

    def step(self) -> int:
        rank = self._rank
        rank.compute(rank.chain)
        flat = torch.cat([parameter.grad.view(-1) for parameter in rank.parameters if parameter.grad is not None])
        self._feedback += flat
        drawn = torch.randperm(self._size, generator=self._generator)[: int(self._size * CocktailSGD.DRAWN)].sort().values
        candidates = self._feedback[drawn]
        chosen, decoded, message = CocktailSGD.message(candidates, self._share)
        self._feedback[drawn[chosen]] -= decoded
        if self._flying is not None:
            self._apply(self._flying.result())
        self._flying = self._sender.submit(self._gather, message, drawn)
        return len(message)

    def _gather(self, message: bytes, drawn: Tensor) -> Tensor:
        """Return the mean over all clusters."""
        ranks = self._rank.ranks
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([len(message)]))
        most = max(int(size) for size in sizes)
        padded = torch.from_numpy(np.frombuffer(message.ljust(most, b"\0"), dtype=np.uint8).copy())
        messages = [torch.empty(most, dtype=torch.uint8) for _ in range(ranks)]
        dist.all_gather(messages, padded)
        mean = torch.zeros(self._size)
        for size, raw in zip(sizes, messages, strict=True):
            positions, values = decoded_message(raw[: int(size)].numpy().tobytes())
            mean[drawn[torch.from_numpy(positions)]] += torch.from_numpy(values).float() / ranks
        return mean

    def _apply(self, mean: Tensor) -> None:
        offset = 0
        for parameter in self._rank.parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(mean[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self._rank.update()


def main() -> None:
    kind, rank, ranks, _, folder, run_file, data, step_seconds, share, steps = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "gloo"), int(ranks))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    copy = Rank(Manifest.from_toml(Path(run_file).read_text()), Path(data), float(step_seconds))
    computing = copy.calibrate()
    step = allreduce(copy) if kind == "allreduce" else Cocktail(copy, float(share)).step
    step()  # connections
    if kind != "allreduce":
        step()  # and the first that waits for one
    print(json.dumps({"computing": computing}), flush=True)
    sys.stdin.readline()
    for _ in range(int(steps)):
        began = time.monotonic()
        sent = step()
        print(json.dumps({"seconds": time.monotonic() - began, "sent": sent}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
