"""Guard for the recursion limit."""

import sys
from contextlib import suppress
from importlib import import_module

_frames = sys.getrecursionlimit()
for _library in ("eth", "py_ecc"):
    with suppress(ImportError):
        import_module(_library)
sys.setrecursionlimit(_frames)
"""These libraries allow 100,000 frames, more than the stack: deep JSON would end the test process."""
