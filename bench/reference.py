"""`python -m bench.reference`: generated pages of docs/reference, and the blocks that other pages take from the source.

A generated page is written as a whole. A block of another page is between `<!-- NAME -->` and `<!-- /NAME -->`. A test
checks that pages and blocks match the source.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from bench.pages import markdown, render
from dilocox.cli.commands import PANELS
from dilocox.cli.environment import long_flag, variable, verbs
from dilocox.cli.exit_codes import Exit
from dilocox.cli.main import app
from dilocox.protocol import limits
from dilocox.protocol.errors import reason_name
from dilocox.protocol.run.allowed_values import annotated, section_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.views import json_schema
from dilocox.views.error_codes import FAULTS
from dilocox.views.reasons import REASONS

__all__ = ["BLOCKS", "GENERATED", "main", "stale"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def docstring(module: str) -> str:
    """Return the docstring of a module, by its path."""
    return ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""


def figure(module: str, first: str) -> str:
    """Return the indented part of a module's docstring that begins with `first`, as code."""
    found = re.search(rf"^    {re.escape(first)}.*?(?=^\S|\Z)", docstring(module), re.MULTILINE | re.DOTALL)
    assert found, f"{module}: no figure that begins with {first}"
    lines = [line.removeprefix("    ") for line in found[0].rstrip().splitlines()]
    return "\n".join(["```", *lines, "```"])


def following(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the names of a module or class that have a text below them, with the text."""
    for node, after in pairwise(body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(text, str) and isinstance(target, ast.Name):
            yield target.id, " ".join(text.split())


def written(name: str, value: float) -> str:
    """Return a limit; bytes in the largest unit that divides them."""
    units = [(size, unit) for size, unit in ((1 << 40, "TiB"), (limits.MIB, "MiB"), (limits.KIB, "KiB")) if value % size == 0]
    if name.endswith("BYTES") and units:
        return f"{value // units[0][0]:,} {units[0][1]}"
    return f"{value:,.0f} bytes" if name.endswith("BYTES") else f"{value:,.0f}"


def limits_page() -> str:
    body = ast.parse((ROOT / "protocol" / "limits.py").read_text()).body
    rows = [[f"`{name}`", written(name, getattr(limits, name)), text] for name, text in following(body)]
    return "Bounds of everything that arrives from outside.\n\n" + markdown(["limit", "value", "why"], rows)


def settings_page() -> str:
    """Return the settings of a run file by section, with default, bounds and meaning."""
    texts = {
        (node.name, name): text
        for module in ("manifest", "model")
        for node in ast.parse((ROOT / "protocol" / "run" / f"{module}.py").read_text()).body
        if isinstance(node, ast.ClassDef)
        for name, text in following(node.body)
    }
    parts = ["Settings of a run file. `dilocox init` writes them, with values for the run's model."]
    for title, model in sections(Manifest, ""):
        properties = model.model_json_schema().get("properties", {})
        rows = [
            [f"`{name}`", default(field), bounds(properties.get(name, {})), texts.get((model.__name__, name), "")]
            for name, field in model.model_fields.items()
            if section_of(annotated(field)) is None
        ]
        if rows:
            parts.append(f"## `[{title}]`\n\n" + markdown(["setting", "default", "allowed", "meaning"], rows))
    return "\n\n".join(parts)


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a manifest's sections by their names in a run file."""
    yield path or "run", model
    for name, field in model.model_fields.items():
        if (inner := section_of(annotated(field))) is not None:
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def default(field: Any) -> str:
    """Return the default of a setting as a run file has it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "–" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def bounds(schema: Mapping[str, Any]) -> str:
    """Return the allowed values of a setting, from its JSON schema."""
    found = [schema, *schema.get("anyOf", [])]
    parts = [" or ".join(f"`{value}`" for value in each["enum"]) for each in found if "enum" in each]
    parts += [f"`{each['const']}`" for each in found if "const" in each]
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    parts += [f"{sign} {each[key]:,}" for each in found for key, sign in signs.items() if key in each]
    return ", ".join(parts)


def commands_page() -> str:
    """Return every command with its options, by panel of the help."""
    root: Any = get_command(app)
    parts = [
        "Every option is also read from the environment and from `--config FILE`, if the command has it.",
        "Plugins add commands: `market`, `settlement`, `shares`, `zerog`.",
    ]
    for panel, names in PANELS.items():
        parts.append(f"## {panel}")
        for name in names:
            if name not in root.commands:
                continue
            for words, command in verbs(root.commands[name], name):
                parts.append(f"### `dilocox {words}`\n\n{' '.join((command.help or '').split())}")
                rows = [row for option in command.params if (row := option_row(words, option)) is not None]
                if rows:
                    parts.append(markdown(["option", "default", "variable", "meaning"], rows))
    return "\n\n".join(parts)


def option_row(words: str, option: Any) -> list[str] | None:
    """Return a row of the table of a command's options; None for `--help`."""
    flag = long_flag(option)
    if flag is None and option.param_type_name == "option":
        return None
    value = option.default
    shown = "required" if option.required else "" if value is None or callable(value) or value == () else f"`{value}`"
    names = (
        ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        if flag
        else f"`{option.metavar or option.name}`"
    )
    return [names, shown, f"`{variable(words, flag)}`" if flag else "", " ".join((getattr(option, "help", "") or "").split())]


def codes_page() -> str:
    advice = [[f"`{reason_name(reason)}`", said.means, said.do] for reason, said in sorted(REASONS.items())]
    faults = [[f"`{code}`", str(fault.status or "–"), fault.means, fault.do] for code, fault in FAULTS.items()]
    exits = [[str(each.value), each.says] for each in Exit]
    classes = ast.parse((ROOT / "protocol" / "wire" / "attestation.py").read_text()).body
    evidence = next(node for node in classes if isinstance(node, ast.ClassDef) and node.name == "Code")
    codes = [[f"`{name.lower().replace('_', '-')}`", text] for name, text in following(evidence.body)]
    return "\n\n".join(
        [
            "`error[CODE]: what failed`, on stderr, and below it what to do. The API's problem documents have the same codes.",
            "## Exit codes\n\n" + markdown(["exit code", "when"], exits),
            "## Error codes\n\n" + markdown(["code", "HTTP", "meaning", "do"], faults),
            "## Reasons for uncounted work\n\n" + markdown(["reason", "meaning", "do"], advice),
            "## Reasons on the wire\n\n" + reasons(),
            "## Codes of invalid evidence\n\n" + markdown(["code", "meaning"], codes),
        ]
    )


def reasons() -> str:
    text = (ROOT / "proto" / "dilocox" / "v1" / "messages.proto").read_text()
    found = re.findall(r"^  REASON_(\w+) = (\d+);\s*// ?(.*)$", text, re.MULTILINE)
    rows = [[f"`{name.lower().replace('_', '-')}`", sentence] for name, number, sentence in found if number != "0"]
    return markdown(["reason", "meaning"], rows)


DOCUMENTS: Mapping[str, Mapping[str, str]] = {
    "`/v1/status`, `dilocox status --json`, of a node": json_schema.NODE,
    "`/v1/status`, of a coordinator": json_schema.COORDINATOR,
    "`/v1/status`, of a relay or archive": json_schema.HOLDER,
    "`/v1/status`, of a daemon that starts, waits or stands by": json_schema.WAITING,
    "`dilocox status --json` without a daemon": json_schema.STOPPED,
    "`/v1/peers`, `dilocox peers --json`": json_schema.PEER,
    "`/v1/stages`, `dilocox peers --stages --json`": json_schema.STAGE,
    "`/v1/rounds`, `dilocox rounds --json`": json_schema.ROUND_ROW,
    "`/v1/rounds/N`, `dilocox rounds N --json`": json_schema.ROUND,
    "`/v1/explain/N`, `dilocox rounds N --why --json`": json_schema.EXPLAINED,
    "`/v1/events`, `dilocox events --json`": json_schema.EVENT,
}
"""Documents of the API by heading."""


def http_page() -> str:
    parts = [
        "Every daemon answers on loopback, or where `--api` says. `--json` prints the same documents. `/openapi.json` has this "
        "page for programs. Errors are `application/problem+json` with `code`, `title`, `status` and `do`.",
        "`a.b` is field b of a, `a[]` each item of a list, `*` a key that the value defines. null: unknown, or absent. Times are "
        "seconds, sizes bytes, losses nats per token.",
    ]
    for heading, fields in DOCUMENTS.items():
        rows = [[f"`{name}`", says] for name, says in fields.items()]
        parts.append(f"## {heading}\n\n" + markdown(["field", "meaning"], rows))
    return "\n\n".join(parts)


def metrics_page() -> str:
    metrics = sorted({tuple(row) for module in ("views/metrics.py", "node/api/metrics.py") for row in metric_rows(module)})
    events = [
        [f"`{kind}`", " ".join((ast.get_docstring(node) or "").split()), ", ".join(f"`{name}`" for name in fields)]
        for node in ast.parse((ROOT / "protocol" / "events.py").read_text()).body
        if isinstance(node, ast.ClassDef)
        for kind, fields in [event(node)]
        if kind
    ]
    return "\n\n".join(
        [
            "## Metrics\n\n" + markdown(["metric", "type", "labels", "meaning"], [list(row) for row in metrics]),
            "## Events\n\n" + markdown(["event", "meaning", "fields"], events),
        ]
    )


def metric_rows(module: str) -> Iterator[list[str]]:
    """Yield the metrics that a module makes with a constant name."""
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("MetricFamily"):
            name, meaning = (str(each.value) if isinstance(each, ast.Constant) else "" for each in node.args[:2])
            lists = [word.value.elts for word in node.keywords if word.arg == "labels" and isinstance(word.value, ast.List)]
            labels = [ast.unparse(label).strip("'") for each in lists for label in each]
            if name:
                yield [f"`{name}`", node.func.id.removesuffix("MetricFamily").lower(), ", ".join(labels), meaning]


def event(node: ast.ClassDef) -> tuple[str, list[str]]:
    """Return the kind of an event's class, empty for other classes, and its fields."""
    kinds = [
        each.value.value
        for each in node.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "kind" and isinstance(each.value, ast.Constant)
    ]
    fields = [
        ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) != "kind"
    ]
    return str(kinds[0]) if kinds else "", fields


def wire_page() -> str:
    parts = [
        "Messages of `proto/dilocox/v1`, with a sentence for every field.",
        "## Rules of acceptance\n\n" + BLOCKS["rules"](),
    ]
    for path in sorted((ROOT / "proto" / "dilocox" / "v1").glob("*.proto")):
        parts.append(f"## {path.name}")
        for kind, name, body in re.findall(
            r"^(message|enum|service) (\w+) \{\n(.*?)^\}", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            rows = re.findall(
                r"^\s+(?:(?:repeated|optional) )?(?:rpc )?(?:map<[^>]*> |[\w.]+ )?(\w+)[^/\n]*//\s*(.*)$", body, re.MULTILINE
            )
            if rows:
                parts.append(f"### {kind} `{name}`\n\n" + markdown(["field", "meaning"], [[f"`{a}`", b] for a, b in rows]))
    return "\n\n".join(parts)


GENERATED: Mapping[str, tuple[str, Callable[[], str]]] = {
    "settings": ("Settings", settings_page),
    "commands": ("Commands", commands_page),
    "http": ("HTTP API", http_page),
    "metrics-and-events": ("Metrics and events", metrics_page),
    "codes": ("Codes", codes_page),
    "limits": ("Limits", limits_page),
    "wire": ("Wire", wire_page),
}
"""Generated pages of docs/reference: title and contents."""

BLOCKS: Mapping[str, Callable[[], str]] = {
    "rules": lambda: figure("protocol/consensus/rules.py", "kind  "),
    "coordinator": lambda: figure("protocol/rounds/round_machine.py", "round 0"),
    "member": lambda: figure("protocol/member/member.py", "state before"),
    "phase": lambda: figure("protocol/member/phase.py", "when  "),
    "norms": lambda: figure("protocol/norms.py", "code 0"),
    "standing": lambda: figure("protocol/consensus/reputation.py", "takes a seat in"),
    "well": lambda: figure("views/health.py", "healthy  "),
}
"""Blocks of hand-written pages."""

PAGES_WITH_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "explanation/protocol.md": ("rules", "coordinator", "member", "phase", "norms", "standing"),
    "how-to/monitor.md": ("well",),
}


def contents() -> Iterator[tuple[Path, str]]:
    """Yield every page that is generated, or has blocks, as it should be."""
    for name, (title, body) in GENERATED.items():
        mark = "generated by python -m bench.reference"
        text = f"# {title}\n\n<!-- {mark} -->\n\n{body()}\n\n<!-- /{mark} -->\n"
        yield DOCS / "reference" / f"{name}.md", text
    for name, blocks in PAGES_WITH_BLOCKS.items():
        yield DOCS / name, render((DOCS / name).read_text(), {block: BLOCKS[block] for block in blocks})


def stale() -> list[Path]:
    """Return the pages that differ from the source."""
    return [path for path, text in contents() if not path.exists() or path.read_text() != text]


def main() -> None:
    for path, text in contents():
        path.write_text(text)


if __name__ == "__main__":
    main()
