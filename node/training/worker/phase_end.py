"""End of a phase: payloads and checkpoints are made in the background of the next phase."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

log = logging.getLogger(__name__)


class Boundaries:
    def __init__(self, folder: Path, cluster: str, trainer: Trainer, store: BlobStore) -> None:
        """Prepare checkpoints. `cluster`: owner of the payloads."""
        self._lacking = any(math.isinf(checkpoint.complete_age(folder, state.stage)) for state in trainer.states)
        """True while a stage has no complete checkpoint: the next one is complete, due or not."""
        self._folder, self._cluster = folder, cluster
        self._trainer, self._store = trainer, store
        self._copied = threading.Event()
        """The inner optimizer may change its tensors."""
        self._copied.set()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        """Waits for the disk, beside training and the background."""
        self._syncing: Future[None] | None = None

    def begin(
        self,
        meta: BoundaryMeta,
        bases: Mapping[int, bytes],
        marks: Callable[[], wire.Marks | None] = lambda: None,
        due: bool = True,
    ) -> Callable[[], dict[int, BoundaryMeta]]:
        """Return the work for the background, which returns the written checkpoints by stage. The next step calls `wait`
        before its update. `bases`: digests of the states that the phase started from, by stage; `marks`: returns its
        audit checkpoints. `due`: write a complete checkpoint, unless the disk still writes the last one; a stage without
        an earlier one has one in any case."""
        syncing = self._syncing is not None and not self._syncing.done()
        complete, self._lacking = self._lacking or (due and not syncing), False
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
            digest = self._store.put([encoded.raw], waits=False)
            checkpoint.save_outer(self._folder, state, meta.round, complete)
            metas[state.stage] = replace(
                meta,
                complete=complete,
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
        if complete:
            self._syncing = self._disk.submit(self._make_durable, metas)
        return metas

    def _make_durable(self, metas: Mapping[int, BoundaryMeta]) -> None:
        """Wait for the disk: first the blobs that the checkpoints name, then the checkpoints."""
        try:
            for stage, meta in metas.items():
                self._store.make_durable(bytes.fromhex(digest) for digest in (meta.base_state, meta.payload))
                checkpoint.make_durable(self._folder, stage, meta.round)
        except OSError as error:
            log.error("a checkpoint did not reach the disk, and would be lost with the power: %s", error)

    def sync_payloads(self, payloads: Iterable[bytes]) -> None:
        """Make these blobs durable, beside training: a replay of the chain needs them."""
        if digests := list(payloads):  # none in a copy without outer state
            self._disk.submit(self._sync_payloads, digests)

    def _sync_payloads(self, payloads: Sequence[bytes]) -> None:
        try:
            self._store.make_durable(payloads)
        except OSError as error:
            log.error("a counted payload did not reach the disk: %s", error)

    def wait_for_disk(self) -> None:
        """Wait until the last complete checkpoint is durable."""
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> None:
        """Let the disk finish what it writes; start nothing more."""
        self._disk.shutdown(wait=False, cancel_futures=True)
