"""How the stage workers of one generation find each other: by a file in a folder that only this user may enter, or, where they are
in several boxes, by the first worker's store, which the boxes' daemons carry over their own authenticated stream.

No elastic rendezvous, and no store that torch binds itself: those listen on every interface, ask nobody who they are, and unpickle
what they read. The store's socket is the daemon's, on loopback. gloo and NCCL still open ports for the data itself; `workers.py`
names the interface.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dilocox.node.worker_settings import RENDEZVOUS, STORE_PORT, STORE_SOCKET

__all__ = ["PATIENCE", "join_generation"]

PATIENCE = timedelta(hours=6)
"""Of a collective: one worker may load or apply for long while others wait. The daemon sees a death at once, and a standstill."""


def join_generation(device: torch.device) -> None:
    """torch.distributed with the workers that the daemons started together with this one: tensors of a GPU by NCCL, others by
    gloo."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    workers = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=_store(workers), rank=int(os.environ["RANK"]), world_size=workers, timeout=PATIENCE)


def _store(workers: int) -> dist.TCPStore | dist.FileStore:  # type: ignore[name-defined]
    if port := os.environ.get(STORE_PORT):
        socket = os.environ.get(STORE_SOCKET)
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            int(port),
            is_master=socket is not None,
            master_listen_fd=int(socket) if socket else None,
            wait_for_workers=False,
            timeout=PATIENCE,
        )
    return dist.FileStore(os.environ[RENDEZVOUS], workers)  # type: ignore[attr-defined]
