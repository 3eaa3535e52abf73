"""Pays for a run's work on an EVM chain (README.md)."""

import sys
from contextlib import suppress

_frames = sys.getrecursionlimit()
with suppress(ImportError):
    import eth_account as eth_account
sys.setrecursionlimit(_frames)  # what that imports allows 100,000: JSON that nests deep would then end the process
