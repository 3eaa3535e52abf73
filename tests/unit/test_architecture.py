"""Tests of the house's rules: allowed imports, file lengths, current generated code."""

import ast
import builtins
import filecmp
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from dilocox.cli.commands import VERBS, Verbs
from dilocox.protocol.consensus import checks
from dilocox.protocol.pb.generate import generate
from tests.helpers import manifest_keys

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "transport", "coordinator", "node", "views", "testnet", "cli")
SOURCES = [p for name in (*ROOMS, "bench") for p in (ROOT / name).rglob("*.py")]
SOURCES += (ROOT / "plugins").glob("*/dilocox_*/**/*.py")
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "transport": {"protocol"},
    "views": {"protocol", "transport"},
    "coordinator": {"protocol", "transport", "views"},
    "node": {"protocol", "transport", "views"},
    "testnet": {"protocol", "transport", "views", "coordinator", "node"},
    "cli": {"protocol", "transport", "views", "coordinator", "node", "testnet"},
}
"""Packages that a package may import besides itself: data flows one way."""
HEAVY = {"torch", "transformers", "safetensors"}
WORLD = {"asyncio", "socket", "os", "time", "random", "secrets", "pathlib", "subprocess", "threading", "sqlite3"}
WORLD |= {"grpc", "aiohttp", "torch"}
MOST_SETTINGS, MOST_COMMANDS = 80, 32
MOST_FILES = 15
"""Sources in a folder: more cannot be seen at once."""
SCREEN_LINES = 48
"""Lines of a terminal: the help of a node fits two."""


CORE = ("consensus/rules", "consensus/chain", "consensus/tally", "member/member", "rounds/round_machine")
"""Files of the protocol that iterate over a run's checks and name none of them."""
RULES_OF_CHECKS = {
    "checks.audit_rules",
    "checks.score_rules",
    "checks.bias_rules",
    "checks.availability_rules",
    "payload.data_root",
    "checks.merit_rules",
}
"""Modules of the protocol that only checks import."""
SWITCHES = {"audit", "scoring", "availability", "settlement", "private"}
"""Sections and keys of a manifest that turn on a run's checks."""


def words(path: Path) -> set[str]:
    """Return all identifiers of a file and all words of its texts; of reasons, which are the wire's, only the prefix."""
    text = re.sub(r"\bREASON_\w+", "REASON", path.read_text())
    return set(re.findall(r"[A-Za-z_]+", text))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Return the modules that a file imports, dotted."""
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


def rooms(path: Path) -> set[str]:
    """Return our packages that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("dilocox.")}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str):
    for path in (ROOT / room).rglob("*.py"):
        assert rooms(path) <= {room, *MAY_IMPORT[room]}, relative(path)
        assert not roots(path) & {*ROOMS, "bench", "tests"}, f"{relative(path)}: a room imported twice, under two names"


def folders() -> dict[str, list[Path]]:
    """Return the sources of each folder. Generated code and empty packages are left out."""
    found: dict[str, list[Path]] = {}
    for path in (each for room in ROOMS for each in (ROOT / room).rglob("*.py")):
        if path.name != "__init__.py" and "_pb2" not in path.name:
            found.setdefault(relative(path.parent), []).append(path)
    return found


def imported_folders(path: Path) -> set[str]:
    """Return the other folders of the product that a file imports when it runs, not only for types."""
    tree = ast.parse(path.read_text())
    typing = [
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
    ]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in typing:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                module = name if (ROOT / module_path(name)).exists() else node.module
                found.add(Path(module_path(module)).parent.as_posix())
    return found - {relative(path.parent)}


def module_path(name: str) -> str:
    """Return the path of a module of ours, whether it exists or not."""
    return name.removeprefix("dilocox.").replace(".", "/") + ".py"


@pytest.mark.parametrize("folder", folders())
def test_folder_has_few_files(folder: str):
    assert len(folders()[folder]) <= MOST_FILES


def test_folders_have_no_cycle():
    graph = {folder: {each for path in paths for each in imported_folders(path)} for folder, paths in folders().items()}
    graph = {folder: imported & graph.keys() for folder, imported in graph.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def test_no_module_has_the_name_of_a_builtin():
    names = {path.stem for paths in folders().values() for path in paths}
    assert not names & set(dir(builtins)) - {"all"}


def test_tests_and_benches_import_the_installed_names():
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        assert not roots(path) & set(ROOMS), relative(path)


def test_every_package_is_installed():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in SOURCES if relative(path).split("/")[0] in ROOMS}
    assert set(declared) == {"dilocox." + relative(folder).replace("/", ".") for folder in folders}


def test_the_pure_core_does_no_io():
    for path in (ROOT / "protocol").rglob("*.py"):
        assert "pb" in path.parts or not roots(path) & WORLD, relative(path)


def test_torch_stays_where_it_belongs():
    allowed = ("node/training/", "node/outer/", "bench/")
    lazy = ("dilocox.node.training", "dilocox.node.outer")
    for path in SOURCES:
        if not relative(path).startswith(allowed):
            assert not roots(path) & HEAVY, relative(path)
            heavy = {name for name in imports(path, top_level_only=True) if name.startswith(lazy)}
            assert not heavy, relative(path)


def test_children_do_not_run_what_lies_in_the_current_folder():
    for path in SOURCES:
        text = path.read_text()
        assert text.count('"-m"') == text.count('"-P"'), f"{relative(path)}: python -m without -P"


def test_whoever_starts_a_process_on_the_loop_ends_it_in_one_way():
    """Check that cancellation while a process is collected leaves no zombie."""
    for path in SOURCES:
        text = path.read_text()
        assert "create_subprocess" not in text or path.name == "processes.py", path
        assert text.count("await start_process(") == text.count("await end_process(") or path.name == "processes.py", path


def test_nothing_unpickles_and_nothing_of_torch_listens():
    forbidden = {
        "pickle",
        "elastic_launch",
        "send_object_list",
        "recv_object_list",
        "all_gather_object",
        "torch.load",
    }
    for path in SOURCES:
        names = {
            ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name | ast.Attribute)
        }
        names |= {name.rpartition(".")[2] for name in names | imports(path) if name != "torch.load"}
        assert not names & forbidden, relative(path)
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("TCPStore"):
                assert "master_listen_fd" in {each.arg for each in call.keywords}, "it would bind every interface"
                assert ast.unparse(call.args[0]) == "'127.0.0.1'"


def test_tests_and_benches_reach_for_no_private_name():
    """Check private names. Allowed are those of the file itself, and asyncio's without a public equivalent."""
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                assert ast.unparse(node.value) in ("self", "cls", "asyncio.Handle"), f"{relative(path)}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom):
                assert not [a.name for a in node.names if a.name.startswith("_")], f"{relative(path)}: {ast.unparse(node)}"


def test_hivemind_is_imported_in_one_file_beside_the_bench_of_its_averager():
    users = [relative(path) for path in SOURCES if "hivemind" in roots(path)]
    assert users == ["transport/net/dht_child.py", "bench/averagers.py"]


def test_files_can_be_read_in_one_sitting():
    for path in SOURCES:
        if "_pb2" not in path.name:
            assert len(path.read_text().splitlines()) <= 600, relative(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_code_is_current(tmp_path: Path):
    generate(tmp_path)
    here = {
        path.name: path
        for folder in ("protocol/pb", "plugins/zerog/dilocox_zerog/pb")
        for path in (ROOT / folder).glob("*_pb2*")
    }
    assert {path.name for path in tmp_path.iterdir()} == here.keys()
    for made in sorted(tmp_path.iterdir()):
        assert filecmp.cmp(made, here[made.name], shallow=False), f"run `make proto`: {made.name}"


def test_every_field_of_the_wire_has_a_sentence():
    for path in (ROOT / "proto").rglob("*.proto"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            declares = "=" in line and line.rstrip().split("//")[0].rstrip().endswith(";") and "syntax" not in line
            assert not declares or "//" in line, f"{relative(path)}:{number}"


@pytest.mark.parametrize("name", CORE)
def test_core_names_no_optional_check(name: str):
    fields = {field for by_field in checks.FIELDS.values() for field in by_field} - {"account", "measured"}
    named = {*checks.WANTED, *SWITCHES, *fields, *(module.rpartition(".")[2] for module in RULES_OF_CHECKS)}
    assert not words(ROOT / "protocol" / f"{name}.py") & named
    path = ROOT / "protocol" / f"{name}.py"
    assert not {each for each in imports(path) if each.startswith("dilocox.protocol.checks")}


WITHOUT_CHECKS = """
import sys
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import Table, identity, manifest

table = Table(manifest(rounds={"count": 2})).genesis()
state = member.start(table.run, identity(0).peer, table.head)
state, _ = member.step(state, member_io.StateReady(1, table.state_root(), None), 0.0)
mine, others = table.contribution(0), [table.contribution(1), table.contribution(2)]
for statement in (mine, *others):
    table.submit(statement)
for event in (member_io.Signed(mine), *map(member_io.Seen, [*others, table.ballots[-1]])):
    state, _ = member.step(state, event, 0.0)
for statement in others:
    state, effects = member.step(state, member_io.Judged(statement.digest, (pb.REASON_UNSPECIFIED, 0)), 0.0)
assert [effect.kind for effect in effects] == [pb.KIND_RECEIPT]
table.vote().train(1).submit(table.report(0))
state, _ = member.step(state, member_io.Committed(table.commits[1], table.verify()), 0.0)
assert table.commits[1].body.counted and table.commits[2].body.counted
print(*sys.modules)
"""


def loaded_by(program: str) -> set[str]:
    """Return the modules that a separate program prints."""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return set(done.stdout.decode().split())


MODULES_OF_CHECKS = {
    *(f"dilocox.protocol.{name}" for name in RULES_OF_CHECKS),
    *(f"dilocox.protocol.checks.{name}" for name in checks.WANTED),
    "dilocox.node.audit.auditor",
    "dilocox.node.audit.messages",
    "dilocox.node.data.privacy_budget",
    "dilocox.node.exchange.shard_roots",
    "dilocox.node.planning.audit_disk_model",
    *(f"dilocox.node.training.worker.{name}" for name in ("audit", "scores")),
    "dilocox.views.audit_views",
    "dilocox_availability",
}


def test_run_without_checks_imports_no_module_of_a_check():
    loaded = loaded_by(WITHOUT_CHECKS)
    assert "dilocox.protocol.consensus.check_interface" in loaded
    assert not loaded & MODULES_OF_CHECKS


@pytest.mark.parametrize(
    "daemon", ["coordinator.daemon", "node.daemon", "node.relay_daemon", "node.training.worker.worker", "cli.main"]
)
def test_daemon_imports_no_module_of_a_check_before_it_knows_its_run(daemon: str):
    loaded = loaded_by(f"import sys, dilocox.{daemon}; print(*sys.modules)")
    assert f"dilocox.{daemon}" in loaded
    assert not loaded & MODULES_OF_CHECKS


def settings() -> set[tuple[str, ...]]:
    """Return the manifest's settings. The model's Hugging Face config is one: its keys are transformers'."""
    keys = {path[:2] if path[:2] == ("model", "config") else path for path in manifest_keys()}
    sections = {path[:depth] for path in keys for depth in range(1, len(path))}
    return keys - sections


def test_settings_commands_and_help_stay_few():
    assert len(settings()) <= MOST_SETTINGS
    commands = Verbs(VERBS, lambda name, command: None)
    assert sum(len(getattr(commands[name], "commands", ())) or 1 for name in VERBS) <= MOST_COMMANDS
    node = commands["node"]
    with node.make_context("dilocox node", [], resilient_parsing=True, terminal_width=80) as context:
        assert len(node.get_help(context).splitlines()) <= 2 * SCREEN_LINES


def test_only_the_seam_and_the_disk_ask_whether_a_run_has_availability():
    rooms = ("transport", "coordinator", "node", "views", "cli")
    asking = {path for room in rooms for path in (ROOT / room).rglob("*.py") if ".availability" in path.read_text()}
    assert {path.relative_to(ROOT).as_posix() for path in asking} == {"node/exchange/shards.py", "node/planning/disk_model.py"}
