"""Memory model of a worker in training: weights, gradients, moments, and activations of microbatches in the pipeline.

Arithmetic only, for the layers of the worker's model. Tests compare it with the tensors that autograd stores, and with
the order of torch's schedules. For one microbatch:

    float32   a layer keeps its input, both norms' (each: what it normed, its scale, what it gave), the turned queries and keys, the
              values, the attention's result, and four tensors of the MLP; Qwen3's norms of queries and keys theirs
    bf16      the same; what the matrix products read is kept in half the bytes, but once for each; their weights once a step
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, chunks, placed
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.tensors import EMBEDDING, TensorSpec, stage_tensors, stage_units, stage_weights

__all__ = [
    "HALF",
    "WIDE",
    "Device",
    "Lack",
    "bubble",
    "fullest_device",
    "held_bytes",
    "host_bytes",
    "lacks",
    "output_bytes",
    "peak",
    "stage_bytes",
]

WIDE, HALF, INDEX = 4, 2, 8
"""Bytes of a float32, a bfloat16 and an int64."""
CANDIDATE_COPIES = 4
"""Copies of the parameters on the host for scoring a contribution."""


@dataclass(frozen=True)
class Device:
    """Most bytes on a device."""

    weights: int
    """Bytes of the weights, with the copies in bf16 that the matrix products of a step read."""
    gradients: int
    moments: int
    activations: int = 0
    """Bytes of activations at the peak of a step, with a receive buffer for each neighbour's message: torch allocates all
    of them first."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.activations


def stage_bytes(manifest: Manifest, stages: Sequence[int], half: bool) -> Device:
    """Return the bytes of some stages without activations: each parameter, its gradient, and one moment (Muon) or two
    (AdamW). Weights under adapters count once, in the precision of the matrix products."""
    muon = manifest.training.optimizer == "muon"
    each = [_of_stage(manifest.model, stage, muon, half) for stage in stages]
    return Device(*(sum(getattr(one, name) for one in each) for name in ("weights", "gradients", "moments")))


@lru_cache(maxsize=4096)
def _of_stage(model: Model, stage: int, muon: bool, half: bool) -> Device:
    specs = stage_tensors(model, stage)
    elements = sum(spec.elements for spec in specs)
    moments = sum(spec.elements * (1 if muon and spec.hidden else 2) for spec in specs)
    copies = sum(spec.elements for spec in specs if half and _is_read(spec))
    frozen = 0
    if model.lora is not None:
        frozen = sum(spec.elements * (HALF if half and _is_read(spec) else WIDE) for spec in stage_weights(model, stage))
    return Device(frozen + WIDE * elements + HALF * copies, WIDE * elements, WIDE * moments)


def _is_read(spec: TensorSpec) -> bool:
    """Return whether matrix products read the tensor: the embedding is a table."""
    return spec.name != EMBEDDING and len(spec.shape) == 2


def host_bytes(manifest: Manifest, stages: Sequence[int]) -> int:
    """Return the bytes of some stages' outer state: Θ, momentum, error feedback and anchor; and of the copy of the moments
    at the end of a phase. With scores, add the candidates: our step; another's, its momentum, and its copy. With
    audits, add the copy of a state that is being written."""
    flat = sum(spec.elements * WIDE for stage in stages for spec in stage_tensors(manifest.model, stage))
    candidate = CANDIDATE_COPIES * flat if manifest.scoring.voters else 0
    moments = stage_bytes(manifest, stages, half=False).moments
    mark = flat + moments if manifest.audit.segments else 0
    return 4 * flat + moments + candidate + mark


def fullest_device(manifest: Manifest, workers: int, microbatches: int, half: bool) -> Device:
    """Return the largest device use in a pipeline of so many workers and microbatches; `half`: matrix products in bf16, as
    on GPUs."""
    return max(_devices(manifest, range(workers), workers, microbatches, half), key=lambda one: one.total)


def _devices(manifest: Manifest, some: Iterable[int], workers: int, microbatches: int, half: bool) -> list[Device]:
    """Return the device use of some workers of a pipeline."""
    parts = chunks(manifest.model.stages, workers, manifest.training.schedule)
    return [_device(manifest, parts[worker], worker, workers, microbatches, half) for worker in some]


def _device(
    manifest: Manifest, mine: Sequence[Sequence[int]], worker: int, workers: int, microbatches: int, half: bool
) -> Device:
    """`mine`: the worker's chunks."""
    training, model = manifest.training, manifest.model
    fixed = stage_bytes(manifest, [stage for chunk in mine for stage in chunk], half)
    held = [
        sum(held_bytes(manifest, stage, half) for stage in chunk) + output_bytes(manifest, chunk[-1], half) for chunk in mine
    ]
    most = peak(worker, workers, microbatches, held)
    if training.checkpoint_activations:
        most += _layer_bytes(model, _tokens(manifest), half)
    ends = 2 * len(mine) - (worker == 0) - (worker == workers - 1)
    ends *= 2 if len(mine) > 1 else 1  # torch's looped schedules store sent tensors, too, until the step ends
    buffers = (
        ends * microbatches * _tokens(manifest) * model.config.hidden_size * (HALF if half else WIDE) if workers > 1 else 0
    )
    return Device(fixed.weights, fixed.gradients, fixed.moments, most + buffers)


@dataclass(frozen=True)
class Lack:
    """Memory that a box does not have."""

    box: int
    where: str
    needs: int
    has: int

    def sentence(self, box: str) -> str:
        return f"{box} would hold {self.needs / 1e9:,.1f} GB {self.where} and has {self.has / 1e9:,.1f}"


def lacks(manifest: Manifest, tiling: Placement, boxes: Sequence[Devices]) -> list[Lack]:
    """Return where a placement on these hosts does not fit, the worst first. Unknown memory fits."""
    found, run = [], placed(manifest, tiling.microbatches, tiling.recompute)
    half = run.training.in_bfloat16(boxes[0].cuda)
    for number, (box, length) in enumerate(zip(boxes, tiling.lengths, strict=True)):
        first = sum(tiling.lengths[:number])
        part = range(first, first + length)
        workers = [device.total for device in _devices(run, part, tiling.length, tiling.each, half)]
        outer = host_bytes(manifest, tiling.stages(number, manifest.model.stages))
        if box.cuda:
            found.append(Lack(number, "on a GPU", max(workers, default=0), box.device_bytes))
            found.append(Lack(number, "in its memory", outer, box.host_bytes))
        else:
            found.append(Lack(number, "in its memory", tiling.copies * sum(workers) + outer, box.host_bytes))
    return sorted((lack for lack in found if 0 < lack.has < lack.needs), key=lambda lack: lack.has / lack.needs)


def held_bytes(manifest: Manifest, stage: int, half: bool) -> int:
    """Return the bytes that autograd stores of one microbatch in a stage until its gradient."""
    model, tokens = manifest.model, _tokens(manifest)
    first, last = stage_units(model)[stage]
    config = model.config
    layers = min(config.num_hidden_layers, last - 1) - max(0, first - 1)
    held = INDEX * tokens if first == 0 else 0
    if layers:
        held += 2 * WIDE * model.sequence_length * config.head_dim  # the rotary tables
    if manifest.training.checkpoint_activations:
        held += layers * WIDE * tokens * config.hidden_size
    else:
        held += layers * _layer_bytes(model, tokens, half)
    if last == config.num_hidden_layers + 2:
        held += tokens * (_norm_bytes(model, 1, half) + WIDE * config.vocab_size + INDEX)  # logarithms of shares, targets
    return held


def output_bytes(manifest: Manifest, stage: int, half: bool) -> int:
    """Return the output bytes of a chunk that ends with this stage, for a microbatch: torch stores it until its gradient."""
    model = manifest.model
    config, last = model.config, stage == model.stages - 1
    return _tokens(manifest) * (WIDE * config.vocab_size if last else (HALF if half else WIDE) * config.hidden_size)


def _tokens(manifest: Manifest) -> int:
    """Return the tokens of a microbatch."""
    return manifest.tokens_per_step // manifest.training.microbatches


def _layer_bytes(model: Model, tokens: int, half: bool) -> int:
    config = model.config
    queries, keys = config.head_dim * config.num_attention_heads, config.head_dim * config.num_key_value_heads
    read = 2 * queries + 2 * keys + 4 * config.intermediate_size
    norms = _norm_bytes(model, 3, half) + _norm_bytes(model, 2, half)
    if config.model_type == "qwen3":  # of queries and keys: what is normed, that normed, a scale for each head
        norms += WIDE * (2 * (queries + keys) + config.num_attention_heads + config.num_key_value_heads)
    if model.lora is not None:  # the result of A, for each; some adapter stores what the frozen products would
        read += model.lora.rank * len(model.lora.targets)
    return tokens * (norms + (HALF if half else WIDE) * read + WIDE * config.num_attention_heads)


def _norm_bytes(model: Model, readers: int, half: bool) -> int:
    """Return the bytes of a token in a norm: its input, the normed input, the scale, and what so many matrix products
    read."""
    hidden = model.config.hidden_size
    return WIDE * (2 * hidden + 1) + hidden * (HALF * readers if half else WIDE)


def peak(worker: int, workers: int, microbatches: int, held: Sequence[int]) -> int:
    """Return the bytes at the peak of a step, if each chunk of a worker stores so many for a microbatch between its
    forward and backward pass.

    Before its first backward pass a worker is some forward passes ahead. With 1F1B these are workers - 1 - worker, one
    for each worker after it. In looped schedules they are a round of all its chunks but one more, and twice as many for
    each worker after it (arXiv 2104.04473).
    """
    turns = len(held)
    each = microbatches // max(1, microbatches // workers)
    ahead = (turns - 1) * each + (workers - 1 - worker) * (2 if turns > 1 else 1)
    passes = turns * microbatches
    most = now = 0
    for number in range(min(passes, ahead + 2 * turns * each)):  # from then on it repeats itself
        now += held[number // each % turns]
        most = max(most, now)
        if number >= ahead:
            now -= held[turns - 1 - (number - ahead) // each % turns]
    return most


def bubble(turns: int, workers: int, microbatches: int) -> float:
    """Return the fraction of a step in which a worker waits for the pipeline to fill and to drain: (p - 1) / (v m + p - 1)
    for p workers with v chunks each and m microbatches (arXiv 2104.04473)."""
    return (workers - 1) / (turns * microbatches + workers - 1)
