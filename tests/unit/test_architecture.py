"""The house's rules: who may import whom, how long files are, that generated code is current."""

import ast
import filecmp
from pathlib import Path

import pytest

from protocol.pb.generate import generate

ROOT = Path(__file__).parents[2]
SOURCES = [p for name in ("protocol", "coordinator", "node", "bench") for p in (ROOT / name).rglob("*.py")]
HEAVY = {"torch", "transformers", "safetensors"}
WORLD = {"asyncio", "socket", "os", "time", "random", "secrets", "pathlib", "subprocess", "threading", "sqlite3"}
WORLD |= {"grpc", "aiohttp", "torch"}


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports, dotted."""
    found: set[str] = set()
    nodes = ast.parse(path.read_text()).body if top_level_only else ast.walk(ast.parse(path.read_text()))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_protocol_imports_nothing_of_ours():
    for path in (ROOT / "protocol").rglob("*.py"):
        assert not roots(path) & {"node", "coordinator", "bench", "tests"}, relative(path)


def test_the_pure_core_does_no_io():
    for path in (ROOT / "protocol").glob("*.py"):
        assert not roots(path) & WORLD, relative(path)
        assert not any(name.startswith("protocol.transport") for name in imports(path)), relative(path)


def test_node_and_coordinator_meet_only_in_the_command_line():
    for path in (ROOT / "coordinator").rglob("*.py"):
        assert "node" not in roots(path), relative(path)
    for path in (ROOT / "node").rglob("*.py"):
        if not relative(path).startswith("node/cli/"):
            assert "coordinator" not in roots(path), relative(path)


def test_torch_stays_where_it_belongs():
    allowed = ("node/training/", "node/outer/", "bench/")
    for path in SOURCES:
        if not relative(path).startswith(allowed):
            assert not roots(path) & HEAVY, relative(path)
            heavy = {name for name in imports(path, top_level_only=True) if name.startswith(("node.training", "node.outer"))}
            assert not heavy, relative(path)


def test_hivemind_is_imported_in_one_file():
    users = [relative(path) for path in SOURCES if "hivemind" in roots(path)]
    assert users == ["protocol/transport/dht_child.py"]


def test_files_can_be_read_in_one_sitting():
    for path in SOURCES:
        if "_pb2" not in path.name:
            assert len(path.read_text().splitlines()) <= 600, relative(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_code_is_current(tmp_path: Path):
    generate(tmp_path)
    for made in sorted(tmp_path.iterdir()):
        assert filecmp.cmp(made, ROOT / "protocol" / "pb" / made.name, shallow=False), f"run `make proto`: {made.name}"


def test_every_field_of_the_wire_has_a_sentence():
    for path in (ROOT / "proto").rglob("*.proto"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            declares = "=" in line and line.rstrip().split("//")[0].rstrip().endswith(";") and "syntax" not in line
            assert not declares or "//" in line, f"{relative(path)}:{number}"
