"""The documentation says what the source says."""

import re
from pathlib import Path

from bench.reference import ADVICE, ADVICE_PAGE, PAGE, render
from dilocox.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_tables_of_the_protocol_page_are_the_source_s():
    assert PAGE.read_text() == render(PAGE.read_text()), "run python -m bench.reference"

    told = ADVICE_PAGE.read_text()
    assert told == render(told, ADVICE), "run python -m bench.reference"


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, anchor


def test_every_verb_that_the_pages_name_exists():
    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    for page in PAGES:
        named = re.findall(r"`(?:\.venv/bin/)?dilocox ([a-z]+)", page.read_text())
        assert set(named) <= verbs, page.name
