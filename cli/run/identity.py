"""`dilocox id`: who this machine is, for allow-lists and for the run file that names its coordinator."""

import sys

from dilocox.cli.common import HomeOption
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.data_directory import load_identity

__all__ = ["identity"]


def identity(home: HomeOption = None) -> None:
    """Print the peer id of a daemon's folder (default: the node's). The first use creates it."""
    folder = home or base_folder() / "node"
    sys.stdout.write(f"{load_identity(folder / 'identity.key').peer}\n")
