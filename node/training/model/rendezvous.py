"""Rendezvous of the workers of one worker group. On one host they use a file in a folder that only this user may enter. On
several hosts they use the first worker's store, over the authenticated stream of the hosts' daemons.

No elastic rendezvous, and no store that torch binds: those listen on every interface, authenticate no peer, and
unpickle what they read. The daemon owns the store's socket, on loopback. gloo and NCCL still open ports for the data;
the pool names the interface.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dilocox.node.workers.environment import RENDEZVOUS, STORE_PORT, STORE_SOCKET

__all__ = ["PATIENCE", "join_generation"]

PATIENCE = timedelta(hours=6)
"""Timeout of a collective: one worker may load or apply for long while others wait. The daemon notices a death at once,
and a stall."""


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
