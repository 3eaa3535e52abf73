"""Tables on stdout, JSON in bench/results/."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dilocox.cli.run.init import render_preset
from dilocox.protocol.run.manifest import Manifest

__all__ = ["bench_parser", "judge", "load_preset", "machine", "table", "write"]

RESULTS = Path(__file__).parent / "results"


def table(columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def machine() -> dict[str, Any]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"device": device, "cores": os.cpu_count(), "torch": torch.__version__, "platform": platform.platform()}


def write(name: str, results: Any, quick: bool = False) -> Path:
    """Write results; return their path. `quick`: beside those of a whole run, which stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-quick' * quick}.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    return path


def bench_parser(name: str, doc: str | None, quick: str, bars: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the two options that every bench takes. `doc`: the module's; `quick`: its short form; `bars`:
    whether it has any."""
    check = (
        "exit with 1 where a bar is missed" if bars else "as without it: this bench measures, and no issue names a bar for it"
    )
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def judge(missed: Sequence[str], check: bool) -> None:
    """Print the missed bars; with `check` exit with 1 if there is one."""
    for sentence in missed:
        print(f"MISSED: {sentence}")
    if missed and check:
        sys.exit(1)


def load_preset(name: str) -> Manifest:
    return Manifest.from_toml(render_preset(name, name, "00" * 32))
