"""Run of every bench: a new rule for statements, or a moved name, breaks benches that are started rarely."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENCE_SECONDS

pytestmark = [pytest.mark.e2e]
BENCH = Path(__file__).parents[2] / "bench"
MEASURE_NOTHING = {"__main__", "docs", "reference", "exchangers", "reproducers"}
"""The run of all of them, what makes pages of their results, and what two of them start as processes."""

NEEDS = {"bench.standby": ["etcd"]}
"""Programs that are none of ours, by bench."""


def programs() -> dict[str, Path]:
    """Return the programs by the name that `python -m` takes."""
    found = {f"bench.{path.stem}": path for path in BENCH.glob("*.py") if path.stem not in MEASURE_NOTHING}
    found |= {f"bench.{path.parent.name}": path for path in BENCH.glob("*/__main__.py")}
    return {name: path for name, path in sorted(found.items()) if '__name__ == "__main__"' in path.read_text()}


@pytest.mark.parametrize("name", programs())
def test_a_bench_takes_what_all_take(name: str):
    source = programs()[name].read_text()
    assert "bench_parser(" in source or ('"--check"' in source and '"--quick"' in source)


@pytest.mark.thorough
@pytest.mark.parametrize("name", programs())
def test_a_bench_runs_in_short(name: str):
    if needs := [program for program in NEEDS.get(name, []) if shutil.which(program) is None]:
        pytest.skip(f"no {', '.join(needs)} on this machine")
    command = [sys.executable, "-m", name, "--quick"]
    done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=30 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()
