"""Imported weights of a run, from a copy of their folder on this machine: `dilocox node --from`. A node without a copy
fetches them."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.manifest import Model
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox.transport.process.processes import end_process, start_process
from dilocox.transport.store.blobs import BlobStore

__all__ = ["import_weights"]

log = logging.getLogger(__name__)


TELL_SECONDS = 2.0
"""Interval of progress lines in the log."""


async def import_weights(
    model: Model,
    manifest: Path,
    source: Path,
    store: BlobStore,
    home: Path,
    tell: Callable[[str], None] = lambda says: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Store the run's imported weights, made of the Hugging Face folder `source` by a process of its own; `manifest`: the
    run's, as a file. `tell` receives each finished stage. Raises ConfigError if the folder contains other weights."""
    root = model.imported
    if not root:
        raise ConfigError(f"remove --from {source}: the run begins with its seed, without imported weights")
    if await asyncio.to_thread(_here, root, store):
        return
    what = f"importing the run's weights from {source}"
    log.info("%s", what)
    pipe, process, told, last = ParentPipe(home), None, dict[str, Any](), clock()
    try:
        process = await start_process(
            sys.executable,
            "-P",
            "-m",
            "dilocox.node.training.hf.hf_import",
            *map(str, (manifest, source, store.folder)),
            env=pipe.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            told = json.loads(line)
            if "stages" not in told:
                continue
            says = f"{what}: {told['stages']} of {model.stages} stages"
            tell(says)
            if clock() - last >= TELL_SECONDS:
                log.info("%s", says)
                last = clock()
        await process.wait()
    finally:
        pipe.close()
        if process is not None:
            await end_process(process)
    if process.returncode:
        raise LocalError(f"cannot read {source}; the error is above")
    if "refused" in told:
        raise ConfigError(told["refused"])
    made = bytes.fromhex(told["root"])
    if made != root:
        for digest in {*store.stage_digests(made), made} - set(store.stage_digests(root)):  # what came of the right one stays
            await asyncio.to_thread(store.remove, digest)
        raise ConfigError(
            f"the weights in {source} give {made.hex()}, but the run's imported weights are {root.hex()}: "
            "another model or revision. Pass the owner's one, or remove --from to fetch them."
        )


def _here(root: bytes, store: BlobStore) -> bool:
    """Blocking."""
    stages = store.stage_digests(root)
    return bool(stages) and all(store.sound(digest) for digest in (root, *stages))
