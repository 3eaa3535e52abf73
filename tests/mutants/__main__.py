"""`make mutants`: do the fast tests notice a fault? First the mutants of mutants.toml, then mutmut over the core.

    python -m tests.mutants [--table | --mutmut] [--minutes N] [NAME …]

Each mutant is applied alone to a copy of the tree. The tests that it names must fail with it and pass without it.
The exit code is 1 if a mutant survives or no longer applies.
mutmut's survivors are printed for a person to judge: another wording is no fault.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "mutants.toml"
MUTATED = ("rules", "tally", "gathered", "head", "chain", "round", "member", "phase", "ledger", "messages", "norms", "standing")
FAST = (
    "tests/unit/test_round.py",
    "tests/unit/test_rules.py",
    "tests/unit/test_member.py",
    "tests/unit/test_faults.py",
    "tests/unit/test_phase.py",
    "tests/unit/test_messages.py",
    "tests/unit/test_bounds.py",
    "tests/unit/test_sentences.py",
    "tests/unit/test_tally.py",
    "tests/unit/test_standing.py",
    "tests/unit/test_head.py",
    "tests/unit/test_attested_rounds.py",
    "tests/property/test_ledger.py",
    "tests/unit/test_why_open.py",
    "tests/unit/test_deadlines.py",
    "tests/unit/test_effects.py",
    "tests/unit/test_compose.py",
)
"""Tests for mutmut: every mutant runs those of them that reach it."""
SLOW = "tests/unit/test_faults.py::test_a_thousand_strangers_fill_no_commit"
KILLED = ("killed", "timeout", "suspicious")
MUTMUT_MINUTES = 25.0
ENDLESS, LEAST_SECONDS = 20, 300.0
"""Tests count as endless if they take this many times longer than without a patch, beside others of their kind, and at
least this long."""


def copy_tree(folder: Path) -> None:
    """Copy the files of a checkout in their current state, and the product as `dilocox/…`."""
    left = shutil.ignore_patterns(".git", ".venv", ".whl", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left, dirs_exist_ok=True)
    (folder / "dilocox").symlink_to(folder / "import_root" / "dilocox")


def run(folder: Path, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
    copies = [folder, *sorted((folder / "plugins").iterdir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, copies)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, **options)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Mutant:
    """A change of one file that breaks a promise, and the tests that must notice it."""

    name: str
    line: str
    """The entry of [lines] that it guards."""
    breaks: str
    """A sentence: what the changed program does wrong."""
    file: str
    """Relative to the root of the repository."""
    tests: tuple[str, ...]
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Replace the old text in the file below `root`. Raises ValueError if the old text does not occur exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} contains the old text of {self.name} {count} times; change `old` in {TABLE.name}")
        path.write_text(text.replace(self.old, self.new))


def table() -> tuple[Mapping[str, str], Sequence[Mutant]]:
    """Return the lines that mutants guard, by key, and the mutants."""
    found = tomllib.loads(TABLE.read_text())
    mutants = [Mutant(name, **{**fields, "tests": tuple(fields["tests"])}) for name, fields in found["mutants"].items()]
    return found["lines"], mutants


def run_tests(folder: Path, *tests: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    return run(folder, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests, timeout=seconds)


def outcome(mutant: Mutant, took: Mapping[str, float]) -> str:
    """Return "killed", "SURVIVED" or what went wrong; `took`: seconds of each file of tests, from `unspoilt`."""
    patience = max(LEAST_SECONDS, ENDLESS * sum(took[test.partition("::")[0]] for test in mutant.tests))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        try:
            mutant.apply(folder)
        except (OSError, ValueError) as error:
            return f"DOES NOT APPLY: {error}"
        try:
            tested = run_tests(folder, *mutant.tests, seconds=patience)
        except subprocess.TimeoutExpired:
            return "killed (the tests do not end)"
        if tested.returncode == 1:
            failed = re.search(r"FAILED \S+::(\S+)", tested.stdout)
            return f"killed by {failed[1] if failed else '?'}"
        return "SURVIVED" if tested.returncode == 0 else f"THE TESTS DO NOT RUN: {tested.stdout[-300:]}{tested.stderr[-300:]}"


def unspoilt(tests: list[str]) -> Mapping[str, float]:
    """Return the seconds that each file's tests take without any mutant. Raises RuntimeError if a test fails."""
    with tempfile.TemporaryDirectory() as name:
        folder, took = Path(name), defaultdict[str, float](float)
        copy_tree(folder)
        told = ("--junitxml", "told.xml", "-o", "junit_family=xunit1")
        tested = run_tests(folder, "-n", "auto", "--dist", "loadfile", *told, *tests)
        if tested.returncode:
            raise RuntimeError(tested.stdout[-1000:])
        for case in ElementTree.parse(folder / "told.xml").iter("testcase"):
            took[case.attrib["file"]] += float(case.attrib["time"])
        return took


def end(pool: ThreadPoolExecutor, doing: Sequence[Future[Any]]) -> None:
    """End the pool with the processes that it started, and those that it may be about to start."""
    pool.shutdown(wait=False, cancel_futures=True)
    while not all(each.done() for each in doing):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.1)


def survivors(mutants: Sequence[Mutant]) -> int:
    """Run the tests of each mutant; return how many mutants were not killed."""
    alive = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        whole = pool.submit(unspoilt, sorted({test for mutant in mutants for test in mutant.tests}))
        doing: list[Future[Any]] = [whole]
        try:
            took = whole.result()
            outcomes = [pool.submit(outcome, mutant, took) for mutant in mutants]
            doing.extend(outcomes)
            for mutant, done in zip(mutants, outcomes, strict=True):
                alive += not done.result().startswith("killed")
                print(f"{mutant.name:48} {done.result()}", flush=True)
        except RuntimeError as error:
            print(f"the tests fail without any mutant:\n{error}")
            return len(mutants)
        finally:
            end(pool, doing)
    print(f"{alive} of {len(mutants)} mutants survive" if alive else f"all {len(mutants)} mutants are killed")
    return alive


def mutmut(names: list[str], minutes: float) -> None:
    """Mutate the core; print what survives, and how much of it was tried in time."""
    modules = names or list(MUTATED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        (folder / "dilocox").unlink()
        shutil.copytree(folder / "import_root" / "dilocox", folder / "dilocox")  # real files, for a tool that follows no links
        only = ", ".join(f'"dilocox/protocol/{module}.py"' for module in modules)
        tests = ", ".join(f'"{test}"' for test in FAST)
        settings = (
            f'\n[tool.mutmut]\nsource_paths = ["dilocox"]\nonly_mutate = [{only}]\nalso_copy = ["tests", "proto"]\n'
            f'pytest_add_cli_args_test_selection = [{tests}]\npytest_add_cli_args = ["--deselect", "{SLOW}"]\n'
        )
        with (folder / "pyproject.toml").open("a") as file:
            file.write(settings)
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(os.cpu_count())]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            try:
                process.wait(60 * minutes)
            except subprocess.TimeoutExpired:
                print(f"stopped after {minutes:g} minutes")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = run(folder, sys.executable, "-m", "mutmut", "results", "--all", "true").stdout.splitlines()
        if not found:
            print((folder / "log").read_text()[-2000:])
    states = [(mutant.strip(), state) for mutant, _, state in (line.partition(": ") for line in found) if state]
    for module in modules:
        mine = [state for mutant, state in states if f"dilocox.protocol.{module}." in mutant]
        killed = sum(state in KILLED for state in mine)
        print(f"{module:10} {killed:5} killed of {len(mine) - mine.count('not checked'):5} tried; {len(mine)} mutants")
    for mutant, state in states:
        if state not in (*KILLED, "not checked"):
            print(f"{state:12} {mutant}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true", help="only the mutants of mutants.toml")
    parser.add_argument("--mutmut", action="store_true", help="only mutmut")
    parser.add_argument("--minutes", type=float, default=MUTMUT_MINUTES, help="limit for mutmut")
    parser.add_argument("names", nargs="*", help="mutants of mutants.toml, or modules of protocol/; default: all")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the child processes
    modules = [name for name in arguments.names if name in MUTATED]
    named = [name for name in arguments.names if name not in MUTATED]
    mutants = {mutant.name: mutant for mutant in table()[1]}
    if unknown := [name for name in named if name not in mutants]:
        parser.error(f"no mutant and no module has this name: {', '.join(unknown)}; use a name of {TABLE.name}")
    alive = 0
    if not arguments.mutmut and (named or not modules):
        alive = survivors([mutants[name] for name in named or mutants])
    if not arguments.table and (modules or not named):
        mutmut(modules, arguments.minutes)
    sys.exit(1 if alive else 0)
