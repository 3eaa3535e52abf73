"""Tests that the documentation agrees with the source."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.main import get_command

from bench import docs, reference
from dilocox.cli.commands import VERBS, plugins
from dilocox.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "plugins").glob("*/README.md")]


def test_generated_pages_match_the_source():
    assert not reference.stale(), "run python -m bench.reference"


def test_tables_of_results_match_the_results_that_are_kept():
    assert not docs.stale(), "run python -m bench.docs"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, anchor


def test_every_verb_that_the_pages_name_exists():
    for page in PAGES:
        named = re.findall(r"`(?:\.venv/bin/)?dilocox ([a-z]+)", page.read_text())
        assert set(named) <= VERBS.keys() | plugins().keys(), page.name


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands that a page lets a reader type: words of each `dilocox …`, in blocks and between backquotes."""
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(inline.split()) for inline in re.findall(r"`([^`]+)`", outside)]
    for line in lines:
        if found := re.match(r"(?:sudo )?(?:\.venv/bin/)?dilocox (.+)", line.partition(" #")[0]):
            with suppress(ValueError):  # a quotation that was cut
                yield shlex.split(re.sub(r"[][|…]", " ", found[1]))


def options_of(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the used and the existing options of the verb that the words name."""
    verb = get_command(app)
    while hasattr(verb, "commands") and words and words[0] in verb.commands:
        verb = verb.commands[words.pop(0)]
    said = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    known = [name for each in verb.params for name in (*each.opts, *each.secondary_opts)]
    return said, [*known, "--help", "--install-completion", "--show-completion"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path):
    for words in commands(page.read_text()):
        shown = " ".join(words)
        said, known = options_of(words)
        assert set(said) <= {*known}, f"{page.name}: dilocox {shown}"


def test_the_pages_have_commands():
    found = [words for page in PAGES for words in commands(page.read_text())]
    assert len(found) > 60
    assert ["init", "my-run.toml", "--preset", "tiny"] in found
    assert ["testnet", "kill", "node-2"] in found
    said, known = options_of(["node", "--hours", "22-06", "--nosuch=1"])
    assert said == ["--hours", "--nosuch"]
    assert "--hours" in known
    assert "--nosuch" not in known


def test_the_site_is_made_of_the_pages_and_asks_nobody_else(tmp_path: Path):
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert pages.keys() >= {"index.html", "docs/reference/settings.html", "examples/private-finetune/index.html"}
    assert "Join a run in five minutes" in pages["index.html"]
    for name, html in pages.items():
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*?(?:src|href)="([^"]+)"', html)
        assert not [url for url in loaded if url.startswith(("http:", "https:", "//"))], name
    for path in PAGES:
        if path.relative_to(ROOT).parts[0] == "plugins":
            continue
        assert path.relative_to(ROOT).with_suffix(".html").as_posix().replace("README", "index") in pages, path.name
