"""Garbage into every parser and every RPC: none is accepted, none crashes a process, memory stays constant.

`python -m bench.fuzz` gives 10⁷ inputs to the parsers (bench/parsers.py) and 10⁵ to the RPCs of real servers
(bench/calls.py). It prints the count of each outcome. bench/results/fuzz stores finished chunks, so an interrupted
bench continues from there. A chunk with a finding runs again, to see whether it repeats. Parsers run in a child
process. A child that dies, or hangs, is a finding like any other, and a new child replaces it. `--replay
"chain.db:4711"` gives one input again in this process, for a debugger.
"""

import asyncio
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from bench import calls
from bench.calls import merged
from bench.mutation import Mutator
from bench.parsers import Target, targets
from bench.report import RESULTS, bench_parser, judge, table, write
from dilocox.protocol.crypto import sha256
from dilocox.transport.store.files import write_atomically

__all__ = ["main", "plan", "run_chunk"]

PARSED, CALLED = 10_000_000, 100_000
QUICK_PARSED, QUICK_CALLED = 60_000, 2_000
CHUNKS = 20
"""Chunks of each target: an interruption costs one of them."""
MOST_GROWTH_BYTES = 50 << 20
HANG_SECONDS = 60.0
"""Seconds after which an input counts as hanging: the slowest honest one takes milliseconds."""
POLL_SECONDS = 0.5
SHOWN = 3
"""Findings of each target that are printed in full."""


@dataclass(frozen=True)
class Chunk:
    target: str
    first: int
    """Number of its first input."""
    count: int


@dataclass
class Outcome:
    """Results of a chunk."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    findings: dict[str, list[int]] = field(default_factory=dict)
    """Findings by exception: the number of the first input, and the count."""
    resident: int = 0
    """Bytes of the process at its end."""


def plan(rows: Sequence[Target], inputs: int) -> list[Chunk]:
    """Return `inputs` over all targets, each by its weight, in chunks that a later start finds again."""
    total, chunks = sum(row.weight for row in rows), []
    for row in rows:
        size = max(1, round(inputs * row.weight / total / CHUNKS))
        chunks += [Chunk(row.name, number * size, size) for number in range(CHUNKS)]
    return chunks


def spoilt(mutator: Mutator, target: Target, seed: int, number: int) -> bytes:
    """Return input `number` of a target: always the same for a seed."""
    mutator.random.seed(int.from_bytes(sha256(target.name.encode())[:8], "big") << 128 | seed << 64 | number)
    return mutator.spoil(mutator.random.choice(target.corpus), target.corpus, target.message)


def run_chunk(target: Target, chunk: Chunk, seed: int, at: Any) -> Outcome:
    """Run a chunk. `at.value`: the number of the current input, for a parent that finds this process dead."""
    outcome, mutator, started = Outcome(inputs=chunk.count), Mutator(0), time.perf_counter()
    for number in range(chunk.first, chunk.first + chunk.count):
        at.value = number
        raw = spoilt(mutator, target, seed, number)
        try:
            target.call(raw)
            outcome.accepted += 1
        except target.errors:
            pass
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            found = outcome.findings.setdefault(described(error), [number, 0])
            found[1] += 1
    outcome.seconds, outcome.resident = time.perf_counter() - started, psutil.Process().memory_info().rss
    return outcome


def described(error: BaseException) -> str:
    """Describe an error by the line that raised it: the same bug has one description."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = ": " + str(error).partition("\n")[0] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__}{what} at {Path(last.filename).name}:{last.lineno}"[:160]


def work(chunks: Sequence[Chunk], seed: int, at: Any, pipe: Connection) -> None:
    """Yield an outcome for each chunk, in a child process."""
    logging.disable(logging.CRITICAL)  # each rejected or ignored input logs a line
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = {row.name: row for row in targets(Path(folder))}
        for chunk in chunks:
            pipe.send(run_chunk(rows[chunk.target], chunk, seed, at))
    pipe.send(None)


@dataclass
class Worker:
    """A child, what it has yet to do, and the input that it is at."""

    waiting: list[Chunk]
    seed: int
    process: BaseProcess | None = None
    moved_at: float = 0.0
    seen: int = -1

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.at = context.Value("q", -1, lock=False)
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(list(self.waiting), self.seed, self.at, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.moved_at = time.monotonic()

    def look(self) -> Iterator[tuple[Chunk, Outcome]]:
        """Yield the outcomes since the last call."""
        if self.process is None and self.waiting:
            self.start()
        try:
            while self.pipe.poll(POLL_SECONDS):
                outcome = self.pipe.recv()
                if outcome is None:
                    return self.end()
                self.moved_at = time.monotonic()
                yield self.waiting.pop(0), outcome
        except EOFError:
            yield self.fallen(f"the process ended with {self.ended()}")
        if self.at.value != self.seen:
            self.seen, self.moved_at = self.at.value, time.monotonic()
        elif time.monotonic() - self.moved_at > HANG_SECONDS:
            yield self.fallen(f"no answer within {HANG_SECONDS:.0f} s")

    def ended(self) -> int | None:
        assert self.process is not None
        self.process.join(HANG_SECONDS)
        return self.process.exitcode

    def fallen(self, why: str) -> tuple[Chunk, Outcome]:
        """Return the chunk at which the child died or hangs; another child takes the rest."""
        number = self.at.value
        self.end()
        return self.waiting.pop(0), Outcome(findings={why: [number, 1]})

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None


class Progress:
    """Finished chunks on disk, by their position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, dict[str, Any]] = json.loads(path.read_bytes()) if path.exists() else {}

    def sound(self, place: str) -> bool:
        return place in self.done and not self.done[place]["findings"]

    def keep(self, place: str, outcome: dict[str, Any]) -> None:
        self.done[place] = outcome
        write_atomically(self.path, json.dumps(self.done).encode())


def place(chunk: Chunk) -> str:
    return f"{chunk.target}:{chunk.first}+{chunk.count}"


def parse(rows: Sequence[Target], inputs: int, seed: int, jobs: int, folder: Path) -> list[dict[str, Any]]:
    """Give the parsers their remaining inputs; return a line for each target."""
    progress, chunks = Progress(folder / f"parsers-{seed}.json"), plan(rows, inputs)
    missing = [chunk for chunk in chunks if not progress.sound(place(chunk))]
    names = sorted({chunk.target for chunk in missing}, key=[row.name for row in rows].index)
    shares = [[chunk for chunk in missing if names.index(chunk.target) % jobs == job] for job in range(jobs)]
    workers = [Worker(share, seed) for share in shares if share]
    with ending(workers):
        while any(worker.waiting for worker in workers):
            for worker in workers:
                for chunk, outcome in worker.look():
                    progress.keep(place(chunk), asdict(outcome))
                    for what, (first, count) in outcome.findings.items():
                        print(f"{chunk.target}:{first}: {count} × {what}", flush=True)
    return [summary(row.name, [progress.done[place(chunk)] for chunk in chunks if chunk.target == row.name]) for row in rows]


@contextmanager
def ending(workers: Sequence[Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            worker.end()


def summary(name: str, outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    findings = {f"{name}:{first}: {what}": count for what, (first, count) in merged(outcomes).items()}
    resident = [outcome["resident"] for outcome in outcomes if outcome["resident"]]
    return {
        "target": name,
        "inputs": sum(outcome["inputs"] for outcome in outcomes),
        "accepted": sum(outcome["accepted"] for outcome in outcomes),
        "seconds": sum(outcome["seconds"] for outcome in outcomes),
        "growth": resident[-1] - resident[0] if resident else 0,
        "findings": findings,
    }


def missed(lines: Sequence[dict[str, Any]], wanted: int) -> list[str]:
    """Return the missed bars, as sentences."""
    found = [f"{count} × {what}" for line in lines for what, count in list(line["findings"].items())[:SHOWN]]
    found += [f"{line['target']}: {line['growth'] >> 20} MiB more" for line in lines if line["growth"] > MOST_GROWTH_BYTES]
    given = sum(line["inputs"] for line in lines)
    return [*found, *([f"{given:,} inputs; wanted are {wanted:,}"] if given < 0.99 * wanted else [])]


def print_lines(what: str, lines: Sequence[dict[str, Any]]) -> None:
    columns = [what, "inputs", "accepted", "µs each", "grew MiB", "findings"]
    rows = [
        [
            line["target"],
            f"{line['inputs']:,}",
            f"{line['accepted']:,}",
            f"{1e6 * line['seconds'] / max(1, line['inputs']):,.0f}",
            f"{line['growth'] / (1 << 20):.1f}",
            str(sum(line["findings"].values())),
        ]
        for line in lines
    ]
    table(columns, rows)
    inputs, seconds = sum(line["inputs"] for line in lines), sum(line["seconds"] for line in lines)
    print(f"{inputs:,} inputs, {inputs / max(seconds, 1e-9):,.0f} a second\n", flush=True)


def replay(text: str, seed: int) -> None:
    """Run one input again, and raise its exception."""
    name, _, number = text.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        target = next(row for row in targets(Path(folder)) if row.name == name)
        raw = spoilt(Mutator(0), target, seed, int(number))
        print(raw)
        target.call(raw)


def fuzz(parsed: int, called: int, seed: int, jobs: int, folder: Path) -> list[str]:
    """Print and write the figures; return the missed bars."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = targets(Path(scratch))
    lines = parse(rows, parsed, seed, jobs, folder)
    print_lines("parser", lines)
    progress = Progress(folder / f"calls-{seed}.json")
    asked = asyncio.run(calls.call_all(called, seed, progress.done, progress.keep))
    print_lines("method", asked)
    write("fuzz", {"seed": seed, "parsers": lines, "calls": asked})
    return [*missed(lines, parsed), *missed(asked, called)]


def main(arguments: Sequence[str] = ()) -> list[str]:
    parser = bench_parser("bench.fuzz", __doc__, "few inputs: under a minute")
    parser.add_argument("--inputs", type=int, help=f"for the parsers; default {PARSED:,}")
    parser.add_argument("--calls", type=int, help=f"for the RPCs; default {CALLED:,}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes for the parsers")
    parser.add_argument("--folder", type=Path, default=RESULTS / "fuzz", help="where it is kept what was done")
    parser.add_argument("--replay", metavar="PARSER:NUMBER", help="give one input again, in this process")
    options = parser.parse_args(arguments)
    if options.replay:
        replay(options.replay, options.seed)
        return []
    parsed = options.inputs or (QUICK_PARSED if options.quick else PARSED)
    called = options.calls or (QUICK_CALLED if options.quick else CALLED)
    found = fuzz(parsed, called, options.seed, options.jobs, options.folder)
    judge(found, options.check)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
