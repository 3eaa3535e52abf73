"""Audit checkpoints, the worker's side: states within a phase that a cluster commits to, and between which an auditor
computes.

A checkpoint of a stage is float32, tensor by tensor in the order of payloads. It has the parameters, then the inner
optimizer's tensors: for AdamW a step count and both moments, for Muon its momentum. The next inner step depends on
nothing else except its samples.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor, nn

from dilocox.node.training.model.model import Stage
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.member.phase import PhaseState
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore

__all__ = ["LIVE", "Marks", "load_state", "machine", "parts", "stage_state"]

LIVE = "live"
"""The part of a state that is the parameters."""
Aside = Callable[[Callable[[], list[bytes]]], Future[list[bytes]]]
PHASES_REMEMBERED = 4
"""Phases whose states survive the removal of an abandoned phase's: two may share one."""


def machine(device: torch.device) -> str:
    """Return the facts that, with the numbers of threads and workers, decide the bits of a result."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"cpu {_processor()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def parts(trainer: Trainer, stage: Stage) -> Iterator[tuple[nn.Parameter, str, int]]:
    """(parameter, kind, elements) of a stage's state, in its order."""
    for parameter in stage.tensors():
        yield parameter, LIVE, parameter.numel()
        for kind, scalar in trainer.optimizer.kinds(parameter).items():
            yield parameter, kind, 1 if scalar else parameter.numel()


def stage_state(trainer: Trainer, stage: Stage) -> Tensor:
    """Return a copy of a stage's state, flat, float32, on the host. Missing optimizer tensors are zeros."""
    flat = torch.zeros(sum(elements for _, _, elements in parts(trainer, stage)))
    at = 0
    for parameter, kind, elements in parts(trainer, stage):
        value = parameter.data if kind == LIVE else trainer.optimizer.tensors(parameter).get(kind)
        if value is not None:
            flat[at : at + elements].copy_(value.reshape(-1))
        at += elements
    return flat


def load_state(trainer: Trainer, stage: Stage, flat: Tensor) -> None:
    """The inverse."""
    at, kept = 0, dict[nn.Parameter, dict[str, Tensor]]()
    for parameter, kind, elements in parts(trainer, stage):
        value = flat[at : at + elements]
        at += elements
        if kind == LIVE:
            parameter.data.copy_(value.view(parameter.shape))
        else:
            scalar = trainer.optimizer.kinds(parameter)[kind]
            kept.setdefault(parameter, {})[kind] = value[0].clone() if scalar else value.view(parameter.shape).clone()
    for parameter, tensors in kept.items():
        trainer.optimizer.restore(parameter, tensors)


def _spacing(manifest: Manifest) -> int:
    """Return the inner steps between two audit checkpoints, in a run with audits."""
    from dilocox.protocol.checks import audit_rules

    return audit_rules.spacing(manifest)


class Marks:
    def __init__(self, trainer: Trainer, store: BlobStore, aside: Aside) -> None:
        """`aside`: to what runs beside training, one job after the other."""
        manifest = trainer.manifest
        self._trainer, self._store, self._aside = trainer, store, aside
        self._every = _spacing(manifest) if manifest.audit.segments and trainer.mesh.leads else 0
        self._taken: list[tuple[wire.Mark, Future[list[bytes]]]] = []
        """Checkpoints of the running phase."""
        self._moved = False
        """A commit was moved onto since the last inner step."""
        self._over = False
        """The phase has ended: where rounds are delayed its commit comes then, when the optimizer's steps may be the next one's."""
        self._handed: deque[set[bytes]] = deque(maxlen=PHASES_REMEMBERED)
        """States of the phases that were announced."""

    def before_step(self, state: PhaseState) -> None:
        """Before each inner step."""
        if not self._every or not state.on_roster:
            return
        if state.steps == 0:
            self._give_up()
        if state.steps % self._every == 0 or self._moved:
            self._take(state.steps, state.samples_read)
        self._moved = False

    def before_commit(self, steps: int, samples_read: int) -> None:
        """Before the live parameters move onto a commit, after so many inner steps of the phase."""
        if self._taken and not self._over:
            self._take(steps, samples_read)
            self._moved = True

    def end(self, steps: int, samples_read: int) -> None:
        """The phase is over; before its work becomes feedback."""
        if self._taken:
            self._take(steps, samples_read)
            self._over = True

    def collect(self) -> Callable[[], wire.Marks | None]:
        """Hand over those of the phase that has ended: in the background, after all that was put aside before; None where the run
        does not audit."""
        taken, self._taken, self._moved, self._over = self._taken, [], False, False

        def gather() -> wire.Marks | None:
            if not taken:
                return None
            for mark, written in taken:
                mark.states.extend(written.result())
            self._handed.append({state for mark, _ in taken for state in mark.states})
            mesh = self._trainer.mesh
            return wire.Marks(
                marks=[mark for mark, _ in taken],
                machine=machine(mesh.device),
                threads=torch.get_num_threads(),
                workers=mesh.workers,
            )

        return gather

    def _take(self, steps: int, samples_read: int) -> None:
        """One copy at a time waits for the disk."""
        if self._taken:
            self._taken[-1][1].result()
        copies = [stage_state(self._trainer, stage) for _, stage in self._trainer.live_stages()]
        mark = wire.Mark(step=steps, samples_read=samples_read, optimizer_steps=self._trainer.optimizer.steps)
        self._taken.append((mark, self._aside(lambda: [self._store.put([copy.numpy().data]) for copy in copies])))

    def _give_up(self) -> None:
        """Abandon the last phase's states: its round closed without it, and no auditor requests them."""
        taken, self._taken, self._moved, self._over = self._taken, [], False, False

        def remove() -> list[bytes]:
            states = {state for _, written in taken for state in written.result()}
            gone: Sequence[bytes] = sorted(states.difference(*self._handed))
            for state in gone:
                self._store.remove(state)
            return list(gone)

        if taken:
            self._aside(remove)
