"""Measurement of the project's language: sentences of docstrings, comments and pages, and the rules that each breaks.

The rules are those of docs/glossary.md that a program can find. A hit is a sentence to read again, and not always a fault.
"""

import ast
import io
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["RULES", "Sentence", "broken", "measure", "of_messages", "pages", "sentences", "texts"]

RULES = ("nominal", "fragment", "private", "long")
"""Rules by name: a nominal clause as subject, a docstring without a head, a private word, too many words."""

LONGEST = {"page": 35, "message": 25}
"""Most words of a sentence, by its kind. A placeholder counts once."""
NOMINAL = re.compile(r"(Who|What|Whom|Whose|Where|Which|Whoever|Whatever|How)\b")
FRAGMENT = re.compile(
    r"(Of|As|Between|With|By|None|And|But|Also|Until|Since|For|In|At|To|From|On|Over|Besides?|Not|Free of|Set|Told|Asked|"
    r"Hosted|Given|Made|Kept|Said|Taken)\b|…"
)
PRIVATE = re.compile(
    r"\b(told|tells?|telling|said|says|speaks?|spoken|hears?|heard|lacks?|lies|laid|stands?|employed|crew|desk|office|diary|"
    r"carrying|carries|place|room|door|marks?|own|keep(s|ing)?|hold(s|ing)?|whoever|nobody|somebody|everybody|meanwhile|anew|"
    r"lurks?|strangers?|go(es)? on|let go|gone|comes? of|word|life|lives|rise|risen|ways?|looks? at|looked|looked at|owed|"
    r"begun|foretold|hires?|appoint(s|ed)?|show|shown)\b",
    re.IGNORECASE,
)
"""Words that the project used in a sense of its own. Some are plain words elsewhere, so a page may use a few."""


DIALECT = re.compile(
    r"\b(say|box(es)?|mend|dial(s|led)?|to be had|leave (it|them) (away|out)|(is|are) no (?!longer|more)[a-z]+|ours|"
    r"the lead(?! host|er)|there (is|are) no|takes? no part|who(m|ever)?\b(?! can| may)|foretell|sealed?|not heard)\b",
    re.IGNORECASE,
)
"""Dialect of earlier messages. An error names what failed, the value, and what to do: use, pass, set, run."""


class Sentence(NamedTuple):
    """Sentence of a text, with its place."""

    where: str
    text: str
    kind: str
    """`page`, `comment`, `message`, or `docstring`, also of an attribute."""
    first: bool
    """True for the first sentence of its text."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, without its code and its indented tables."""
    text = re.sub(r"\n\s*\n", ". ", text)
    text = re.sub(r"(?m)^ {4,}.*$", " ", text)
    text = " ".join(re.sub(r"`[^`]*`", "X", text).split())
    for found in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9…\"(])", text):
        if len((sentence := found.strip(" .")).split()) > 1:
            yield sentence


def broken(sentence: Sentence) -> set[str]:
    """Return the rules that a sentence breaks."""
    found = set()
    if NOMINAL.match(sentence.text) and not sentence.text.endswith("?"):
        found.add("nominal")
    if sentence.first and sentence.kind == "docstring" and FRAGMENT.match(sentence.text):
        found.add("fragment")
    if PRIVATE.search(sentence.text) or (sentence.kind == "message" and DIALECT.search(sentence.text)):
        found.add("private")
    if len(sentence.text.split()) > LONGEST.get(sentence.kind, math.inf):
        found.add("long")
    return found


def measure(root: Path, paths: list[Path]) -> tuple[int, Counter[str]]:
    """Return the number of sentences in some files, and of those that break each rule."""
    count, hits = 0, Counter[str]()
    for path in paths:
        for sentence in texts(root, path):
            count += 1
            hits.update(broken(sentence))
    return count, hits


def texts(root: Path, path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a source file or a page."""
    written = pages if path.suffix == ".md" else _source
    for line, kind, text in written(path):
        for number, sentence in enumerate(sentences(text)):
            yield Sentence(f"{path.relative_to(root)}:{line}", sentence, kind, number == 0)


def of_messages(source: str, found: list[str]) -> Iterator[Sentence]:
    """Yield the sentences of a source's messages, with X for each placeholder and each option."""
    for message in found:
        text = re.sub(r"\{[^{}]*\}|%[-+.\d]*[sdf]|--[a-z-]+", "X", message)
        for number, sentence in enumerate(sentences(text)):
            yield Sentence(source, sentence, "message", number == 0)


def pages(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the paragraphs that people wrote in a page: no headings, tables, code and generated blocks."""
    text = path.read_text()
    for generated in (r"```.*?```", r"<!-- ([\w .-]+) -->.*?<!-- /\1 -->"):
        text = re.sub(generated, lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip() and not paragraph.lstrip().startswith(("|", "#", "<")):
            yield line, "page", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        line += paragraph.count("\n")


def _source(path: Path) -> Iterator[tuple[int, str, str]]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(written))):
                    yield statement.lineno, "docstring", written
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa|pragma|!)", token.string):
            yield token.start[0], "comment", token.string.lstrip("# ")
