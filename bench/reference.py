"""`python -m bench.reference`: the parts of pages that quote the source. docs/protocol.md quotes the rules, the machines,
the reasons and the limits; docs/operations.md the action for each reason and code; docs/api.md the API's answers.

A block of a page is between `<!-- NAME -->` and `<!-- /NAME -->`; a test verifies that every block equals the source.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from bench.pages import markdown, render
from dilocox.cli.exit_codes import Exit
from dilocox.protocol import limits
from dilocox.protocol.errors import reason_name
from dilocox.views import json_schema as fields
from dilocox.views.error_codes import FAULTS
from dilocox.views.reasons import REASONS

__all__ = ["ADVICE", "ADVICE_PAGE", "API", "API_PAGE", "BLOCKS", "main"]

ROOT = Path(__file__).parents[1]
PAGE, ADVICE_PAGE, API_PAGE = (ROOT / "docs" / f"{name}.md" for name in ("protocol", "operations", "api"))


def docstring(module: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""


def figure(module: str, first: str) -> str:
    """The indented part of a module's docstring that begins with `first`, as code."""
    text = docstring(module)
    found = re.search(rf"^    {re.escape(first)}.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{module}: no figure that begins with {first}"
    lines = [line.removeprefix("    ") for line in found[0].rstrip().splitlines()]
    return "\n".join(["```", *lines, "```"])


def limit_rows() -> str:
    rows = [
        [f"`{name}`", written(name, getattr(limits, name)), sentence]
        for name, sentence in constants(ROOT / "protocol" / "limits.py")
    ]
    return markdown(["limit", "value", "why"], rows)


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """(name, the sentence below it) of each constant of a module that has one."""
    for node, following in pairwise(ast.parse(path.read_text()).body):
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, " ".join(str(following.value.value).split())


def written(name: str, value: float) -> str:
    """Bytes in the largest unit that they fill."""
    units = [(size, unit) for size, unit in ((1 << 40, "TiB"), (limits.MIB, "MiB"), (limits.KIB, "KiB")) if value % size == 0]
    if name.endswith("BYTES") and units:
        return f"{value // units[0][0]:,} {units[0][1]}"
    return f"{value:,.0f} bytes" if name.endswith("BYTES") else f"{value:,.0f}"


def reasons() -> str:
    text = (ROOT / "proto" / "dilocox" / "v1" / "messages.proto").read_text()
    found = re.findall(r"^  REASON_(\w+) = (\d+);\s*// (.*)$", text, re.MULTILINE)
    rows = [[f"`{name.lower().replace('_', '-')}`", sentence] for name, number, sentence in found if number != "0"]
    return markdown(["reason", "meaning"], rows)


def advice_rows() -> str:
    rows = [[f"`{reason_name(reason)}`", said.means, said.do] for reason, said in sorted(REASONS.items())]
    return markdown(["reason", "it means", "do"], rows)


def exit_rows() -> str:
    return markdown(["exits with", "when"], [[str(each.value), each.says] for each in Exit])


def fault_rows() -> str:
    rows = [[f"`{code}`", str(fault.status or "–"), fault.means, fault.do] for code, fault in FAULTS.items()]
    return markdown(["code", "HTTP", "it means", "do"], rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "rules": lambda: figure("protocol/consensus/rules.py", "kind  "),
    "coordinator": lambda: figure("protocol/rounds/round_machine.py", "round 0"),
    "member": lambda: figure("protocol/member/member.py", "state before"),
    "phase": lambda: figure("protocol/member/phase.py", "when  "),
    "norms": lambda: figure("protocol/norms.py", "code 0"),
    "standing": lambda: figure("protocol/consensus/reputation.py", "takes a seat in"),
    "reasons": reasons,
    "limits": limit_rows,
}


def field_rows(fields: Mapping[str, str]) -> str:
    return markdown(["field", "says"], [[f"`{name}`", says] for name, says in fields.items()])


API: Mapping[str, Callable[[], str]] = {
    "node": lambda: field_rows(fields.NODE),
    "coordinator": lambda: field_rows(fields.COORDINATOR),
    "holder": lambda: field_rows(fields.HOLDER),
    "waiting": lambda: field_rows(fields.WAITING),
    "stopped": lambda: field_rows(fields.STOPPED),
    "peer": lambda: field_rows(fields.PEER),
    "stage": lambda: field_rows(fields.STAGE),
    "row": lambda: field_rows(fields.ROUND_ROW),
    "round": lambda: field_rows(fields.ROUND),
    "explained": lambda: field_rows(fields.EXPLAINED),
    "event": lambda: field_rows(fields.EVENT),
}

ADVICE: Mapping[str, Callable[[], str]] = {
    "advice": advice_rows,
    "well": lambda: figure("views/health.py", "healthy  "),
    "exits": exit_rows,
    "faults": fault_rows,
}


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(), BLOCKS))
    ADVICE_PAGE.write_text(render(ADVICE_PAGE.read_text(), ADVICE))
    API_PAGE.write_text(render(API_PAGE.read_text(), API))


if __name__ == "__main__":
    main()
