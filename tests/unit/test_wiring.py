"""Rules for how objects are put together: small constructors that only store, and nothing assigned from outside."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("node", "coordinator", "transport")
MOST_PARAMETERS = 8
RECORDS = {
    "plugins/tee/dilocox_tee/snp.py:Report",
    "node/audit/messages.py:Task",
    "node/daemon.py:OpenRun",
    "node/preflight/machine.py:Here",
    "node/workers/progress.py:Progress",
    "node/planning/disk_model.py:Written",
    "node/outer/checkpoint.py:BoundaryMeta",
    "node/context/settings.py:NodeSettings",
    "node/workers/environment.py:WorkerSettings",
    "coordinator/daemon.py:CoordinatorSettings",
    "transport/limits/connection_limits.py:_Connection",
}
"""Dataclasses of values alone: settings, rows of a file or a message, counters. They may have more fields."""
LIBRARIES = ("node/data/", "node/outer/", "node/training/")
"""Folders whose files set attributes of objects of torch and tokenizers, as those libraries want it."""
VALUES = {"answer", "connection", "duty", "payload", "progress", "share", "sign", "_kept"}
"""Names of variables that contain a record or a message, whose fields its user sets."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources() -> list[tuple[str, Path]]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found += sorted((ROOT / "plugins").glob("*/dilocox_*/**/*.py"))
    return [(path.relative_to(ROOT).as_posix(), path) for path in found]


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    nodes = [(name, node) for name, path in sources() for node in ast.walk(parsed(path))]
    return [(f"{name}:{node.name}", node) for name, node in nodes if isinstance(node, ast.ClassDef)]


def methods(of: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in of.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def constructors(of: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in methods(of) if each.name in ("__init__", "__post_init__")]


def is_dataclass(of: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in of.decorator_list)


def parameters(of: ast.ClassDef) -> int:
    """Return how many values a caller may pass to make one."""
    fields = [each for each in of.body if isinstance(each, ast.AnnAssign)] if is_dataclass(of) else []
    passed = [each for each in fields if each.value is None or "init=False" not in ast.unparse(each.value)]
    for each in constructors(of):
        if each.name == "__init__":
            return len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]) - 1
    return len(passed)


def own_attributes() -> set[str]:
    """Return the names of all attributes that a constructor of ours stores, except those of dataclasses."""
    found = set[str]()
    for _, each in classes():
        for node in [inner for made in constructors(each) if not is_dataclass(each) for inner in ast.walk(made)]:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        found.add(part.attr)
    return found


def assignments(path: Path) -> Iterator[ast.Attribute]:
    """Yield attributes of other objects that a file assigns. A class may assign those of what its `classmethod` makes."""
    made = {name.partition(" = ")[0].strip() for name in path.read_text().split("\n") if " = cls.__new__(cls)" in name}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    owner = ast.unparse(part.value) if isinstance(part, ast.Attribute) else "self"
                    if owner not in ("self", "cls", *made) and owner.rpartition(".")[2] not in VALUES:
                        assert isinstance(part, ast.Attribute)
                        yield part


def test_constructors_have_few_parameters():
    large = {name for name, each in classes() if parameters(each) > MOST_PARAMETERS}
    assert large - RECORDS == set()
    assert large >= RECORDS, "a record that is small needs no exception"


def test_records_do_nothing():
    """Check records: a class that awaits, or is called for its work, is none."""
    for name, each in classes():
        if name in RECORDS:
            assert is_dataclass(each), name
            assert not [method for method in methods(each) if isinstance(method, ast.AsyncFunctionDef)], name


def test_no_attribute_is_assigned_from_outside():
    """Check that an object receives its dependencies in its constructor, and that only its own code changes its
    attributes."""
    found, own = set[str](), own_attributes()
    for name, path in sources():
        if not name.startswith(LIBRARIES):
            found |= {f"{name}:{ast.unparse(each)}" for each in assignments(path) if each.attr in own}
    assert found == set()


def test_no_callback_waits_for_its_value():
    found = set[str]()
    for name, each in classes():
        made = [inner for method in constructors(each) for inner in ast.walk(method)]
        for node in [*made, *(each.body if is_dataclass(each) else [])]:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda):
                found.add(f"{name}:{ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)}")
    assert found == set()


def test_no_method_stores_a_callback():
    """Check methods: one that stores it after the constructor is a late callback by another name."""
    aliases = {
        target.id
        for _, path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign) and "Callable" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set[str]()
    for name, each in classes():
        for method in [other for other in methods(each) if other not in constructors(each)]:
            notes = {arg.arg: arg.annotation for arg in [*method.args.args, *method.args.kwonlyargs] if arg.annotation}
            words = {arg: set(ast.unparse(note).replace("[", " ").split()) for arg, note in notes.items()}
            callbacks = {arg for arg, said in words.items() if said & {"Callable", *aliases}}
            for node in ast.walk(method):
                own = isinstance(node, ast.Assign) and ast.unparse(node).startswith("self.")
                if own and ast.unparse(node).rpartition(" = ")[2] in callbacks:
                    found.add(f"{name}.{method.name}")
    assert found == set()


def test_constructors_start_no_task_and_feed_no_machine():
    acts = ("create_task", "ensure_future", "tasks.start", "feed", "resume", "start_server", "start_process", "start_soon")
    found = set[str]()
    for name, each in classes():
        for node in [inner for method in constructors(each) for inner in method.body]:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and not inside_lambda(call, node)]
            if [
                call
                for call in calls
                if ast.unparse(call.func).rpartition(".")[2] in acts or "tasks.start" in ast.unparse(call.func)
            ]:
                found.add(name)
    assert found == set()


def inside_lambda(call: ast.Call, statement: ast.stmt) -> bool:
    lambdas = [each for each in ast.walk(statement) if isinstance(each, ast.Lambda)]
    return any(call in ast.walk(each) for each in lambdas)


def test_no_class_pretends_to_have_a_method():
    found = set[str]()
    for name, each in classes():
        for method in methods(each):
            body = [part for part in method.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
            if len(body) == 1 and isinstance(body[0], ast.Raise) and "AssertionError" in ast.unparse(body[0]):
                found.add(f"{name}.{method.name}")
    assert found == set()
