"""End of a phase: payloads and checkpoints are made in the background of the next phase."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.audit_checkpoints import of_stage
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore

__all__ = ["Boundaries"]


class Boundaries:
    def __init__(self, folder: Path, every: int, cluster: str, trainer: Trainer, store: BlobStore) -> None:
        """Prepare checkpoints. `cluster`: owner of the payloads. `every`: a round that it divides has a complete
        checkpoint, as has a stage without an earlier complete one."""
        self._lacking = not all(checkpoint.is_complete(folder, state.stage) for state in trainer.states)
        self._folder, self._every, self._cluster = folder, every, cluster
        self._trainer, self._store = trainer, store
        self._copied = threading.Event()
        """The inner optimizer may change its tensors."""
        self._copied.set()

    def begin(
        self, meta: BoundaryMeta, bases: Mapping[int, bytes], marks: Callable[[], wire.Marks | None] = lambda: None
    ) -> Callable[[], dict[int, BoundaryMeta]]:
        """Return the work for the background, which returns the written checkpoints by stage. The next step calls `wait`
        before its update. `bases`: digests of the states that the phase started from, by stage; `marks`: returns its
        audit checkpoints."""
        complete, self._lacking = self._lacking or meta.round % self._every == 0, False
        if complete:
            self._copied.clear()
        return partial(self._write, meta, bases, marks, complete)

    def wait(self) -> None:
        """Wait until no job reads the inner optimizer's tensors any more."""
        self._copied.wait()

    def _save_inner(self, round: int) -> None:
        for stage, tensors in self._copy_inner().items():
            checkpoint.save_inner(self._folder, stage, round, tensors)

    def _copy_inner(self) -> dict[int, dict[str, Tensor]]:
        try:
            return self._trainer.copy_inner()
        finally:
            self._copied.set()

    def _write(
        self, meta: BoundaryMeta, bases: Mapping[int, bytes], marks: Callable[[], wire.Marks | None], complete: bool
    ) -> dict[int, BoundaryMeta]:
        if complete:
            self._save_inner(meta.round)
        metas, marked = {}, marks()
        stages = self._trainer.encode(self._cluster, meta.round, meta.rank_or_k)
        for index, (state, encoded) in enumerate(zip(self._trainer.states, stages, strict=True)):
            digest = self._store.put([encoded.raw])
            checkpoint.save_outer(self._folder, state, meta.round, complete)
            metas[state.stage] = replace(
                meta,
                base_state=bases[state.stage].hex(),
                payload=digest.hex(),
                payload_size=len(encoded.raw),
                norm=encoded.norm,
                effective_rank=encoded.effective_rank,
                error=encoded.error,
                norms=bytes(norm_code(norm) for norm in encoded.norms).hex(),
                marks=canonical(of_stage(marked, index)).hex() if marked is not None else "",
            )
            checkpoint.seal_boundary(self._folder, state.stage, metas[state.stage])
        return metas
