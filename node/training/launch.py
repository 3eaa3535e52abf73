"""Start the stage workers through torch's elastic launcher: `python -m dilocox.node.training.launch WORKERS`.

The launcher gives each worker its rank and one rendezvous; when one dies it ends the others and exits, and the daemon starts again
from the last boundary. It holds on to the daemon's parent pipe, and so does every worker.
"""

import os
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dilocox.transport.parent_pipe import exit_with_parent


def main() -> None:
    workers = int(sys.argv[1])
    exit_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", os.environ["DILOCOX_WORKER_THREADS"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
    )
    elastic_launch(config, sys.executable)("-P", "-m", "dilocox.node.training.worker")


if __name__ == "__main__":
    main()
