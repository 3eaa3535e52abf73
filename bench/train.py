"""Inner step of the product's trainer beside a plain transformers loop and a small fused loop, alternated in one process.

All arms have the same shapes, batch, microbatches, optimizer, precision and threads. The small loop joins projections,
uses torch's RMSNorm, and has fused AdamW: what one writes who needs no other family. On a processor CPU seconds count, on
a GPU the time between two synchronisations. A step's operators are those that compute, without views. MFU: 6 x weights in
matrix products, and causal attention, without recomputation, over the dense bfloat16 peak; on a processor over the rate of
a large matrix product, measured in the same run.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bench.lab import process_group_of_one
from bench.report import bench_parser, judge, load_preset, machine, table, write
from dilocox.node.planning.layouts import choose
from dilocox.node.planning.step_model import KINDS
from dilocox.node.training.model.inner import BETAS
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.model import hugging_face_config
from dilocox.node.training.model.muon import Muon
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.devices import this_machine
from dilocox.node.workers.placement import placed
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.tensors import parameter_count

__all__ = ["flops_per_token", "main", "measure"]

BLOCKS, QUICK_BLOCKS = 7, 2
"""Alternations: each arm takes one step in each."""
WARM = 2
"""Steps before an arm is measured."""
OF_TRANSFORMERS, OF_SMALL = 0.97, 0.92
"""Speed relative to the plain transformers loop and to the small fused one, at least."""

ROPE_BASE = 10_000.0

Step = Callable[[], object]


class Block(nn.Module):
    """Layer of the small loop: joined projections, torch's norm, one attention call."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        config = model.config
        hidden, self.width = config.hidden_size, config.head_dim
        self.sizes = [config.num_attention_heads * self.width, *[config.num_key_value_heads * self.width] * 2]
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        self.before, self.between = (nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(2))
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.qkv(self.before(hidden)).split(self.sizes, -1)
        query, key, value = (part.view(batch, length, -1, self.width).transpose(1, 2) for part in parts)
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.between(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


def _turned(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Small(nn.Module):
    """Decoder of the small loop."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        config = model.config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(model) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        rates = 1.0 / ROPE_BASE ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(model.sequence_length).float(), rates)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cosine, self.sine)
        return self.head(self.norm(hidden))


class Loop:
    """A plain training loop with the run's batch, clip and optimizer."""

    def __init__(self, run: Manifest, model: nn.Module, logits: Callable[[Tensor], Tensor], fused: bool) -> None:
        training = self._training = run.training
        self._logits, self._parameters = logits, list(model.parameters())
        named = model.named_parameters()
        hidden = [
            value
            for name, value in named
            if training.optimizer == "muon" and value.ndim == 2 and not any(part in name for part in ("embed", "head"))
        ]
        rest = [value for value in self._parameters if not any(value is other for other in hidden)]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=1e-4, betas=BETAS, fused=fused, foreach=not fused)
        ]
        if hidden:
            stacked = Muon(hidden, 1e-3, training.weight_decay, training.muon_momentum, Mesh())
            self._optimizers.append(stacked if fused else torch.optim.Muon(hidden, lr=1e-3))

    def step(self, inputs: Tensor, targets: Tensor, half: bool) -> None:
        count = self._training.microbatches
        for part, target in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            with torch.autocast(part.device.type, torch.bfloat16, enabled=half):
                logits = self._logits(part)
            (F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / count).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._training.gradient_clip, foreach=True)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def arm(name: str, run: Manifest, device: torch.device) -> Step:
    """Return one step of an arm, on random tokens of seed 0."""
    torch.manual_seed(0)
    model, half = run.model, run.training.in_bfloat16(cuda=device.type == "cuda")
    tokens = torch.randint(0, model.config.vocab_size, (run.training.batch_size, model.sequence_length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if name.startswith("ours"):
        trainer = Trainer(run, Mesh(device=device))
        if name.endswith("compiled"):
            trainer.compile_layers()
        trainer.load_initial()
        return lambda: trainer.step(inputs, targets)
    with device:
        if name == "transformers":
            whole = AutoModelForCausalLM.from_config(hugging_face_config(model), dtype=torch.float32)
            loop = Loop(run, whole, lambda part: whole(input_ids=part, use_cache=False).logits, fused=False)
        else:
            small = Small(model)
            loop = Loop(run, small, torch.compile(small) if name.endswith("compiled") else small, fused=True)
    inputs, targets = inputs.to(device), targets.to(device)
    return lambda: loop.step(inputs, targets, half)


def seconds(step: Step, device: torch.device) -> float:
    """Return the CPU seconds of a step, or on a GPU its time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    step()
    return time.process_time() - start


def operators(step: Step) -> int:
    """Return how many operators of a step compute: kernels on a GPU; on a processor dispatched operators that are no view."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    events = profile.events() or []
    kernels = [event for event in events if "CUDA" in str(event.device_type)]
    if kernels:
        return len(kernels)
    return sum(event.name.startswith("aten::") and event.name.removeprefix("aten::") not in VIEWS for event in events)


_NO_WORK = (
    "view reshape transpose t permute expand slice select unsqueeze squeeze detach alias as_strided split chunk narrow unbind "
    "_unsafe_view to _to_copy contiguous unflatten flatten view_as split_with_sizes lift_fresh empty empty_like empty_strided "
    "result_type is_nonzero item _local_scalar_dense linear matmul"
)
VIEWS = frozenset(_NO_WORK.split())
"""Operators that compute nothing, or whose work another one does."""


def flops_per_token(model: Model) -> float:
    """Return the operations of forward and backward pass: 6 a weight of a matrix product, and causal attention."""
    config = model.config
    products = parameter_count(model) - config.vocab_size * config.hidden_size  # the embedding is a table
    return 6 * products + 6 * config.num_hidden_layers * model.sequence_length * config.num_attention_heads * config.head_dim


def peak(device: torch.device) -> float:
    """Return the peak operations a second; on a processor those of a large float32 product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(0).lower()
        return next((kind.peak for part, kind in KINDS.items() if part in name), float("nan"))
    size = 1024
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(seconds(lambda: left @ right, device) for _ in range(5))


def measure(run: Manifest, arms: Sequence[str], device: torch.device, blocks: int) -> list[dict[str, Any]]:
    """Return a row of each arm. On a processor steps are alternated; on a GPU, whose clock is steady and whose memory is
    small, one arm follows the other."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    facts: dict[str, dict[str, Any]] = {}
    for together in [[name] for name in arms] if device.type == "cuda" else [list(arms)]:
        steps: dict[str, Step] = {}
        for name in together:
            free(device)
            steps[name] = arm(name, run, device)
            for _ in range(WARM):
                steps[name]()
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            facts[name] = {"operators": operators(steps[name]), "peak_gib": memory}
        for block in range(blocks):
            for name in together if block % 2 == 0 else reversed(together):
                times[name].append(seconds(steps[name], device))
    most, tokens = peak(device), run.tokens_per_step
    ours = times[arms[0]]
    return [
        {
            "arm": name,
            "seconds": statistics.median(times[name]),
            "speed": statistics.median(other / mine for other, mine in zip(times[name], ours, strict=True)),
            "tokens_per_second": tokens / statistics.median(times[name]),
            "mfu": flops_per_token(run.model) * tokens / statistics.median(times[name]) / most,
            **facts[name],
        }
        for name in arms
    ]


def free(device: torch.device) -> None:
    """Return the memory of earlier arms to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def shape(preset: str, quick: bool, cuda: bool) -> Manifest:
    """Return the preset in one stage, with the microbatches that a node with one device chooses; on a processor with AdamW
    and a small batch."""
    sections = load_preset(preset).model_dump()
    sections["model"]["stages"] = 1
    if not cuda:
        sections["training"] |= {"optimizer": "adamw", "batch_size": 4, "microbatches": 2, "checkpoint_activations": False}
        sections["model"]["sequence_length"] = 128 if quick else 256
    run = Manifest.model_validate(sections)
    best = choose(run, [this_machine(1)]).best.placement
    return placed(run, best.microbatches, best.recompute)


def missed_bars(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    missed = []
    for name, bar in (("transformers", OF_TRANSFORMERS), ("small fused", OF_SMALL)):
        speed = next(row["speed"] for row in rows if row["arm"] == name)
        if speed < bar:
            missed.append(f"ours has {speed:.2f} of the speed of the loop '{name}', not {bar:g}")
    return missed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser("bench.train", __doc__, "two alternations of short sequences")
    parser.add_argument("--preset", default=None, help="preset whose shape is trained; default: llama-10m, on a GPU llama-125m")
    parser.add_argument("--compiled", action="store_true", help="also with compiled layers")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    process_group_of_one()
    cuda = device.type == "cuda"
    run = shape(options.preset or ("llama-125m" if cuda else "llama-10m"), options.quick, cuda)
    compiled = ["ours, compiled", "small fused, compiled"] if options.compiled else []
    arms = ["ours", "transformers", "small fused", *compiled]
    rows = measure(run, arms, device, QUICK_BLOCKS if options.quick else BLOCKS)
    facts, training = machine(), run.training
    print(
        f"{facts['device']}, {facts['platform']}; {parameter_count(run.model):,} parameters, {run.tokens_per_step:,} tokens a step"
    )
    print(f"{training.microbatches} microbatches, {training.optimizer}, {training.precision}, one thread, seed 0")
    columns = ["loop", "GPU s a step" if cuda else "CPU s a step", "ours is x times as fast", "tokens/s", "MFU", "operators"]
    table(
        columns,
        [
            [
                row["arm"],
                f"{row['seconds']:.4f}",
                f"{row['speed']:.3f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{100 * row['mfu']:.1f}%",
                f"{row['operators']:,}",
            ]
            for row in rows
        ],
    )
    write(f"train-{options.preset}" if options.preset else "train", rows, options.quick)
    judge(missed_bars(rows), options.check)


if __name__ == "__main__":
    main()
