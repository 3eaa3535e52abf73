"""How the stage workers of one generation find each other: a file in a folder that only this user may enter.

No TCPStore and no elastic rendezvous: those listen on every interface, ask nobody who they are, and unpickle what they read. gloo
and NCCL still open ports for the data itself; `workers.py` keeps them on loopback.
"""

import os
from datetime import timedelta

import torch.distributed as dist

from dilocox.node.worker_settings import RENDEZVOUS

__all__ = ["PATIENCE", "join_generation"]

PATIENCE = timedelta(hours=6)
"""Of a collective: one worker may load or apply for long while others wait. The daemon sees a death at once, and a standstill."""


def join_generation(backend: str) -> None:
    """torch.distributed with the workers that the daemon started together with this one."""
    workers = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[RENDEZVOUS], workers)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=workers, timeout=PATIENCE)
