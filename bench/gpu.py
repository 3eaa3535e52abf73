"""`make gpu`: what one GPU makes of the product, in at most ten minutes and without a network.

Each section is a separate process: the inner step at 125M, 350M and 1B parameters beside other loops, the
codec, the pause of training at the end of a round, and the tests that need a GPU. After each section the results are
written to docs/results/gpu.json; a section that is there for the same machine is not run again. `--quick` runs the short
forms, also without a GPU, and writes to bench/results.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.docs import FOLDER
from bench.report import RESULTS, bench_parser, judge, machine

__all__ = ["SECTIONS", "Section", "collect", "main"]

ROOT = Path(__file__).parents[1]
OUTPUT_LINES = 40
"""Last lines of a section's output that are kept."""


OF_CUDA = ("pytest", "-q", "-mcuda", "tests")


@dataclass(frozen=True)
class Section:
    name: str
    arguments: Sequence[str]
    quick: Sequence[str]
    """Arguments of the short form."""
    seconds: float
    """Seconds that must be left before it starts."""
    result: str
    """Name of its file in bench/results; empty: its output is the result."""
    quick_result: str
    """The same of the short form."""

    def command(self, quick: bool) -> list[str]:
        return [sys.executable, "-P", "-m", *(self.quick if quick else self.arguments)]


def _train(size: str, seconds: float) -> Section:
    preset = f"llama-{size.lower()}"
    start = ["bench.train", "--preset"]
    name = f"train-{preset}"
    return Section(name, [*start, preset, "--compiled"], [*start, "tiny", "--quick"], seconds, name, "train-tiny-quick")


SECTIONS = (
    _train("125m", 60),
    _train("350m", 90),
    _train("1b", 120),
    Section("codec", ["bench.codec"], ["bench.codec", "--quick"], 60, "codec", "codec-quick"),
    Section(
        "boundary",
        ["bench.boundary", "--models", "100M"],
        ["bench.boundary", "--quick"],
        60,
        "boundary-other",
        "boundary-quick",
    ),
    Section("tests", OF_CUDA, OF_CUDA, 60, "", ""),
)


def collect(section: Section, quick: bool, left: float) -> dict[str, Any]:
    """Run a section for at most `left` seconds. Return its result, or the end of its output where it failed."""
    start = time.monotonic()
    try:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(section.command(quick), capture_output=True, text=True, timeout=left, cwd=ROOT, env=environment)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, output = 124, str(error)
    found: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - start, 1)}
    name = section.quick_result if quick else section.result
    path = RESULTS / f"{name}.json"
    if code == 0 and name and path.exists():
        return {**found, "results": json.loads(path.read_text())["results"]}
    return {**found, "output": output.splitlines()[-OUTPUT_LINES:]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser("bench.gpu", __doc__, "the short form of each section, also without a GPU")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no section after so many minutes (default: 10)")
    parser.add_argument("--only", default="", help="sections, such as codec,tests (default: all)")
    options = parser.parse_args(arguments)
    facts = machine()
    if facts["device"] == "cpu" and not options.quick:
        parser.error("there is no GPU here: pass --quick to try the script")
    unknown = set(filter(None, options.only.split(","))) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in SECTIONS)}")
    path: Path = RESULTS / "gpu-quick.json" if options.quick else FOLDER / "gpu.json"
    RESULTS.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    sections: dict[str, Any] = kept["sections"] if kept.get("machine") == facts and not options.quick else {}
    began, missed = time.monotonic(), []
    for section in SECTIONS:
        left = 60 * options.minutes - (time.monotonic() - began)
        if options.only and section.name not in options.only.split(","):
            continue
        if sections.get(section.name, {}).get("exit") == 0:
            print(f"{section.name}: measured before")
            continue
        if left < section.seconds:
            print(f"{section.name}: {left:.0f} s are left, it needs {section.seconds:.0f}; run the command again")
            continue
        sections[section.name] = collect(section, options.quick, left)
        path.write_text(json.dumps({"machine": facts, "sections": sections}, indent=1) + "\n")
        print(
            f"{section.name}: exit {sections[section.name]['exit']} after {sections[section.name]['seconds']:.0f} s", flush=True
        )
        if sections[section.name]["exit"]:
            missed.append(f"{section.name} ended with {sections[section.name]['exit']}")
    print(f"written: {path}")
    judge(missed, options.check)


if __name__ == "__main__":
    main()
