"""Cost of the exchange for the trainer: seconds per inner step during an exchange, over seconds per step without one.

Two real nodes and a coordinator run. The measured node's training thread has core 0 alone. Its daemon and codec thread,
the whole other node and the coordinator share core 1. The nodes' upload limits make a payload take half, then 90%, of a
phase. A window runs from one applied commit to the next: it contains one encode, one exchange, one apply, one rebase.
Between windows the swarm is stopped, with no exchange in progress, and a process that trains alone takes core 0 for as
many steps. So the two windows of a pair follow each other, and a drift of the machine affects both. Rounds are
time-boxed: the other node takes the steps that fit on its shared core. So both payloads are ready together, and the
limits alone decide when the commit arrives.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.report import bench_parser, table, write
from bench.texts import stdlib
from bench.wire import payload_bytes
from dilocox.cli.run.init import render_preset
from dilocox.node.workers.environment import WORKER
from dilocox.protocol.run.manifest import Manifest
from dilocox.testnet.swarm import Testnet
from dilocox.transport.store.data_directory import load_identity

__all__ = ["main"]

POLL_SECONDS = 0.05
PAIRS = 7
TRAINER_CORE, OTHER_CORE = 0, 1
SHARES = (0.5, 0.9)
"""Shares of a phase that the transfer of one payload takes."""
INNER_STEPS = 60


@dataclass(frozen=True)
class Window:
    steps: int
    seconds: float
    applied_share: float
    """Inner step at which the commit was applied, over the phase's H."""
    codec_cpu: float
    daemon_cpu: float

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(POLL_SECONDS)
    raise SystemExit("the swarm did not get there in time")


class Alone:
    """A process that trains and exchanges nothing; stopped except during its windows."""

    def __init__(self, run_file: Path) -> None:
        code = "from bench.overlap import train_alone; import sys; train_alone(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(run_file)], stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        os.sched_setaffinity(self._process.pid, {TRAINER_CORE})
        for _ in range(5):
            self._line()
        os.kill(self._process.pid, signal.SIGSTOP)

    def _line(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def window(self, steps: int) -> float:
        """Return the seconds per step over `steps` steps."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._line()  # began before the stop
        start = self._line()
        for _ in range(steps):
            end = self._line()
        os.kill(self._process.pid, signal.SIGSTOP)
        return (end - start) / steps

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def train_alone(run_file: str) -> None:
    """Take inner steps for ever in the child, and print the clock after each."""
    import torch
    import torch.distributed as dist

    from dilocox.node.training.model.data import load_dataset
    from dilocox.node.training.model.trainer import Trainer
    from dilocox.node.workers.placement import placed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    manifest = Manifest.from_toml(Path(run_file).read_text())
    trainer = Trainer(placed(manifest))
    trainer.load_initial()
    dataset, batch, position = load_dataset(manifest, stdlib().folder), manifest.training.batch_size, 0
    while True:
        trainer.step(*dataset.batch(list(range(position, position + batch))))
        position += batch
        print(time.monotonic(), flush=True)


class Pair:
    """The swarm: node-1 is measured."""

    def __init__(self, folder: Path, run_file: Path, megabits: float) -> None:
        options = ["--devices", "1", "--threads", "1", "--upload", f"{megabits}mbit"]
        self._testnet = Testnet.create(
            folder / "swarm", run_file.read_bytes(), run_file.with_suffix(".key").read_bytes(), 2, options, stdlib().folder
        )
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {OTHER_CORE})  # inherited by everything that starts now
        self._testnet.start_all()
        os.sched_setaffinity(0, before)
        self._node = self._testnet.member("node-1")
        until(lambda: self._status().get("total_steps", 0) > 0)
        os.sched_setaffinity(self._trainer().pid, {TRAINER_CORE})  # the main thread; the codec thread stays on the other core
        until(lambda: len(self._status().get("applied_at_step", {})) >= 2)

    def _status(self) -> dict[str, Any]:
        return self._node.get("/v1/status") or {}

    def _daemon(self) -> psutil.Process:
        facts = self._node.facts()
        assert facts is not None
        return psutil.Process(facts["pid"])

    def _trainer(self) -> psutil.Process:
        children = self._daemon().children(recursive=True)
        return next(p for p in children if p.name() == WORKER)

    def _everybody(self) -> list[int]:
        pids: list[int] = []
        for member in self._testnet.members:
            facts = member.facts()
            assert facts is not None
            process = psutil.Process(facts["pid"])
            pids += [p.pid for p in (process, *process.children(recursive=True))]
        return pids

    def stop(self) -> None:
        """Stop the swarm, only after an applied commit: then no exchange is in progress."""
        for pid in self._everybody():
            os.kill(pid, signal.SIGSTOP)

    def go(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def window(self) -> Window:
        """Return the window from the next report to the next applied commit."""
        old = self._status()
        start = until(lambda: s if (s := self._status())["clock_seconds"] > old["clock_seconds"] else None)
        cpu = self._daemon().cpu_times()
        applied = set(start["applied_at_step"])

        def commit_applied() -> dict[str, Any] | None:
            status = self._status()
            return status if set(status["applied_at_step"]) - applied else None

        seen = until(commit_applied)
        end = until(lambda: s if (s := self._status())["clock_seconds"] > seen["clock_seconds"] else None)
        after = self._daemon().cpu_times()
        newest = max(seen["applied_at_step"], key=int)
        return Window(
            steps=end["total_steps"] - start["total_steps"],
            seconds=end["clock_seconds"] - start["clock_seconds"],
            applied_share=seen["applied_at_step"][newest] / INNER_STEPS,
            codec_cpu=end["codec_cpu_seconds"] - start["codec_cpu_seconds"],
            daemon_cpu=after.user + after.system - cpu.user - cpu.system,
        )

    def pause(self) -> None:
        self._pids = self._everybody()
        self.stop()

    def close(self) -> None:
        self.go()
        self._testnet.stop()


def run_file(folder: Path, phase: float = 1e5) -> Path:
    """Write a run file. `phase`: seconds of a time-boxed round."""
    path = folder / "run.toml"
    owner = load_identity(path.with_suffix(".key"))
    text = render_preset("tiny", "overlap", owner.key.hex(), digest=bytes.fromhex(stdlib().digest))
    changes = {
        "count = 20": "count = 100000",
        "total_steps = 200": "total_steps = 1000000",
        "inner_steps = 10\n": f"inner_steps = {INNER_STEPS}\n",
        "max_inner_steps = 40": f"max_inner_steps = {20 * INNER_STEPS}\nround_seconds = {phase}",
        "synchronous_rounds = 4": "synchronous_rounds = 0\nevaluate_every = 0",
        "start_clusters = 3": "start_clusters = 2",
        "deadline_seconds = 300": "deadline_seconds = 200000",
        "vote_seconds = 60": "vote_seconds = 80000",
        "liveness_seconds = 10": "liveness_seconds = 3600",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.overlap", __doc__, "one link, one pair of windows", bars=False).parse_args(arguments)
    shares, pairs = (SHARES[:1], 1) if options.quick else (SHARES, PAIRS)
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this bench needs two cores")
    results = []
    with tempfile.TemporaryDirectory(prefix="dx-") as name:
        folder = Path(name)
        path = run_file(folder)
        run = Manifest.from_toml(path.read_text())
        alone = Alone(path)
        phase = INNER_STEPS * alone.window(INNER_STEPS)
        path = run_file(folder, phase)
        for share in shares:
            pair = Pair(folder, path, 8e-6 * payload_bytes(run)[0] / (share * phase))
            ratios, windows = [], []
            try:
                for _ in range(pairs):
                    windows.append(pair.window())
                    pair.pause()
                    ratios.append(windows[-1].per_step / alone.window(windows[-1].steps))
                    pair.go()
            finally:
                pair.close()
            results.append(
                {
                    "link_share": share,
                    "pairs": pairs,
                    "phase_seconds": phase,
                    "applied_share": statistics.median(w.applied_share for w in windows),
                    "ratio_median": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                    "codec_cpu_seconds": statistics.median(w.codec_cpu for w in windows),
                    "daemon_cpu_seconds": statistics.median(w.daemon_cpu for w in windows),
                    "window_seconds": statistics.median(w.seconds for w in windows),
                }
            )
        alone.close()
    columns = ["payload moves in", "commit applied at", "ratio", "min", "max", "codec CPU s", "daemon CPU s", "window s"]
    rows = [
        [
            f"{r['link_share']:.0%} of a phase",
            f"{r['applied_share']:.0%} of H",
            f"{r['ratio_median']:.3f}",
            f"{r['ratio_min']:.3f}",
            f"{r['ratio_max']:.3f}",
            f"{r['codec_cpu_seconds']:.2f}",
            f"{r['daemon_cpu_seconds']:.2f}",
            f"{r['window_seconds']:.1f}",
        ]
        for r in results
    ]
    table(columns, rows)
    write("overlap", results, options.quick)


if __name__ == "__main__":
    main()
