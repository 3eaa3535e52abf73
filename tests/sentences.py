"""Messages that people meet: strings of the sources with two words or more. A reviewer reads each new one in one file.

    python -m tests.sentences [--write]

prints them, or writes them to tests/golden/sentences.txt. Docstrings, assertions, annotations, SQL and patterns are left out.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["FOLDERS", "GOLDEN", "Message", "is_message", "messages", "render", "written"]

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "sentences.txt"
FOLDERS = ("cli", "coordinator", "node", "plugins", "protocol", "testnet", "transport", "views")
"""Folders of the product. Benches and tests print for developers."""

WORD = re.compile(r"(?<![\w-])[A-Za-z][a-z']*(?!\w)")
CODE = re.compile(
    r"\s*(SELECT|INSERT|CREATE|DELETE|UPDATE|ALTER|PRAGMA|BEGIN|DROP)\b|.*(\bTEXT NOT NULL\b|\bPRIMARY KEY\b|BLOB NOT NULL|"
    r"&&|\(\?|\| None\b|Callable\[|%[YHM]\b|\bbold (red|yellow)\b|'self'|'none'|#\w+ |mark quiet$)",
    re.DOTALL,
)
"""Strings of words that are not a message."""
SPACES = re.compile(r"\s+")
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def written(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each source of a folder that has messages: its path and its messages, in their order."""
    for path in sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.html")]):
        name = path.relative_to(ROOT)
        if "_pb2" in name.name or {"pb", "tests", "build"} & set(name.parts):
            continue
        text = path.read_text()
        if found := list(dict.fromkeys(_of_page(text) if path.suffix == ".html" else messages(text))):
            yield str(name), found


def messages(source: str) -> Iterator[str]:
    """Yield the messages of Python code. A placeholder has the last name of its expression: `{error}`."""
    for text in _strings(ast.parse(source)):
        if len(WORD.findall(re.sub(r"\{[^{}]*\}", "", text))) > 1 and " " in text.strip() and not CODE.match(text):
            yield SPACES.sub(" ", text).strip()


def _strings(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(map(_part, values))
            for each in values:
                if isinstance(each, ast.FormattedValue):
                    yield from _strings(each.value)
        case ast.Assert() | ast.Expr(value=ast.Constant()):  # for developers; a docstring
            return
        case _:
            for name, value in ast.iter_fields(node):
                if name not in ("annotation", "returns"):
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST):
                            yield from _strings(child)


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    names = re.findall(r"[A-Za-z_]+", ast.unparse(value.value))
    match value.value:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"{{{name}}}"
    return f"{{{names[-1] if names else ''}}}"


class _Page(HTMLParser):
    """Texts of an HTML page, with those of its script."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.texts += [text for text in re.findall(r'"([^"\n]*)"', data) if text != "use strict"]
        elif self.cdata_elem is None:
            self.texts.append(data)


def _of_page(text: str) -> list[str]:
    page = _Page()
    page.feed(text)
    texts = (" ".join(each.split()) for each in page.texts if not CODE.match(each))
    return [each for each in texts if len(WORD.findall(each)) > 1 and " " in each]


def render() -> str:
    """Return the golden file: a heading for each source, and one line for each message."""
    sources = [source for folder in FOLDERS for source in written(folder)]
    return "\n\n".join("\n".join([f"# {name}", *found]) for name, found in sources) + "\n"


@cache
def _golden(source: str) -> re.Pattern[str]:
    [lines] = [block.splitlines()[1:] for block in GOLDEN.read_text().split("\n\n") if block.startswith(f"# {source}\n")]
    return re.compile("|".join(re.sub(r"\\\{[^{}]*\\\}", ".*", re.escape(line)) for line in lines))


def is_message(text: str, source: str) -> bool:
    """Return whether the golden file has a message of that source."""
    return _golden(source).fullmatch(text) is not None


class Message(str):
    """Text that equals each message of a source with these values: tests name values, not the wording.

    The message has each whole number, in this order, and each other value.
    """

    source: str
    values: tuple[object, ...]

    def __new__(cls, source: str, *values: object) -> "Message":
        made = super().__new__(cls, f"<message of {source} with {', '.join(map(str, values)) or 'no value'}>")
        made.source, made.values = source, values
        return made

    def __eq__(self, other: object) -> bool:
        numbers = [each for each in self.values if isinstance(each, int)]
        return (
            isinstance(other, str)
            and [each for each in map(int, NUMBER.findall(other)) if each in numbers] == numbers
            and all(str(each) in other for each in self.values)
            and is_message(other, self.source)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return super().__hash__()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.sentences", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the golden file")
    if parser.parse_args(arguments).write:
        GOLDEN.write_text(render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
