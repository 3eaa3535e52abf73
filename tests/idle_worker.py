"""Fork server as dilocox.node.training.worker.fork_server, whose workers import nothing, read no settings, and wait until they
are ended."""

import os
import time

from dilocox.node.training.worker.fork_server import serve_daemon
from dilocox.transport.process.parent_pipe import exit_with_parent

if __name__ == "__main__":
    if serve_daemon():
        exit_with_parent()
        # in one piece: other processes write there, too
        os.write(1, f"{os.getsid(0) == os.getpid()} {dict(os.environ)}\n".encode())
        while "ENDS" not in os.environ:
            time.sleep(600)
        raise SystemExit(int(os.environ["ENDS"]))
