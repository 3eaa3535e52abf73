"""The project's language (docs/glossary.md), as a ratchet: the number of sentences that break a rule only falls."""

import difflib
from pathlib import Path

import pytest

from tests.language import RULES, Sentence, broken, measure, of_messages, pages, sentences, texts
from tests.sentences import FOLDERS, GOLDEN, Message, is_message, messages, render, written

ROOT = Path(__file__).parents[2]

MOST: dict[str, tuple[int, int, int, int]] = {
    "CHANGELOG.md": (0, 0, 1, 0),
    "CONTRIBUTING.md": (0, 0, 2, 0),
    "README.md": (0, 0, 2, 0),
    "SECURITY.md": (0, 0, 1, 0),
    "bench": (0, 1, 33, 0),
    "cli": (0, 1, 21, 0),
    "coordinator": (0, 0, 11, 0),
    "deploy": (0, 0, 0, 0),
    "docs": (1, 0, 61, 0),
    "examples": (3, 0, 16, 5),
    "node": (2, 5, 78, 0),
    "plugins": (0, 0, 53, 1),
    "protocol": (0, 0, 55, 0),
    "testnet": (0, 0, 6, 0),
    "tests": (2, 2, 43, 0),
    "transport": (0, 0, 32, 0),
    "views": (0, 0, 3, 0),
}
"""Most sentences that break each of RULES, by folder. Lower a number after an improvement; never raise one."""


def files(folder: str) -> list[Path]:
    """Return the sources and pages of a folder, or one page. Generated code is left out."""
    path = ROOT / folder
    if path.is_file():
        return [path]
    found = [*path.rglob("*.py"), *path.rglob("*.md")]
    return sorted(each for each in found if "_pb2" not in each.name and not {"build", "pb"} & set(each.parts))


MESSAGES: dict[str, tuple[int, int]] = {
    "cli": (27, 9),
    "coordinator": (0, 0),
    "node": (38, 1),
    "plugins": (0, 0),
    "protocol": (4, 0),
    "testnet": (0, 0),
    "transport": (0, 0),
    "views": (2, 0),
}
"""Most sentences of messages that break the rules `private` and `long`, by folder. Lower a number; never raise one."""


@pytest.mark.parametrize("folder", MOST)
def test_folder_breaks_no_more_rules_than_before(folder: str):
    _, hits = measure(ROOT, files(folder))
    found = tuple(hits[rule] for rule in RULES)
    worse = [rule for rule, before, now in zip(RULES, MOST[folder], found, strict=True) if now > before]
    examples = [each for path in files(folder) for each in texts(ROOT, path) if broken(each) & set(worse)]
    assert not worse, "\n".join(f"{each.where}: {each.text}" for each in examples)
    assert found == MOST[folder], f"better than before: write {found} into MOST[{folder!r}]"


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_of_a_folder_break_no_more_rules_than_before(folder: str):
    rules = ("private", "long")
    met = [each for source, found in written(folder) for each in of_messages(source, found)]
    found = tuple(sum(rule in broken(each) for each in met) for rule in rules)
    worse = {rule for rule, before, now in zip(rules, MESSAGES[folder], found, strict=True) if now > before}
    assert not worse, "\n".join(f"{each.where}: {each.text}" for each in met if broken(each) & worse)
    assert found == MESSAGES[folder], f"better than before: write {found} into MESSAGES[{folder!r}]"


def test_golden_file_has_every_message():
    """Run `python -m tests.sentences --write` after a change of messages, so that a reviewer reads each of them."""
    change = list(difflib.unified_diff(GOLDEN.read_text().splitlines(), render().splitlines(), "golden", "sources", n=0))
    assert not change, "run `python -m tests.sentences --write`, and read:\n" + "\n".join(change)


def test_messages_are_found_without_docstrings_assertions_and_queries():
    source = '''"""A module's docstring."""
def look(path: "Path | None") -> None:
    """Raise an error."""
    assert path, "it was checked"
    rows("SELECT name FROM runs")
    raise ValueError(f"cannot read {path.name!r}: "
                     f"{error('too large')}")
'''
    assert list(messages(source)) == ["cannot read {name}: {error}", "too large"]
    assert is_message("cannot read a/b: permission denied", "transport/store/files.py")
    assert not is_message("cannot read a/b", "transport/store/files.py")


@pytest.mark.parametrize(
    ("text", "values", "equal"),
    [
        ("cannot read a.toml: line 3 of 7", ("a.toml", 3, 7), True),
        ("cannot read a.toml: line 3 of 7", (7,), True),
        ("cannot read a.toml: line 3 of 7", (7, 3), False),
        ("cannot read a.toml: line 3 of 7", ("b.toml",), False),
        ("could read a.toml: line 3 of 7", ("a.toml", 3, 7), False),
    ],
)
def test_message_equals_each_message_with_its_values(text: str, values: tuple[object, ...], equal: bool):
    assert (text == Message("transport/store/files.py", *values)) == equal
    assert (text != Message("transport/store/files.py", *values)) != equal


def test_every_folder_of_sources_and_pages_is_measured():
    top = {path.relative_to(ROOT).parts[0] for name in ("*.py", "*.md") for path in ROOT.rglob(name)}
    left_out = {name for name in top if name.startswith(".")} | {"build", "import_root", "typing", "mutants"}
    assert top - left_out == set(MOST)


@pytest.mark.parametrize(
    ("text", "kind", "rules"),
    [
        ("Who leads serves behind it.", "docstring", {"nominal"}),
        ("Who is the leader?", "page", set()),
        ("Of the run.", "docstring", {"fragment"}),
        ("Of the run.", "comment", set()),
        ("The coordinator is told of it.", "comment", {"private"}),
        ("Return the head of the chain.", "docstring", set()),
        ("a " * 36 + "word", "page", {"long", "private"}),
        ("a " * 36 + "day", "comment", set()),
        ("a " * 26, "message", {"long"}),
        ("use --plan, or mend it", "message", {"private"}),
        ("use --plan, or mend it", "comment", set()),
    ],
)
def test_sentence_breaks_the_rules_that_it_should(text: str, kind: str, rules: set[str]):
    [sentence] = sentences(text)
    assert broken(Sentence("", sentence, kind, True)) == rules


def test_page_without_its_code_tables_and_generated_blocks_is_measured(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nOne [link](x.md).\n\n```\ncode\n```\n\n| a |\n\n<!-- b -->\nmade\n<!-- /b -->\n\nTwo `x`.\n")
    assert [text.strip() for _, _, text in pages(page)] == ["One link.", "Two `x`."]
