"""The table of `make mutants` belongs to this tree: a mutant that no longer applies tests nothing."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, Mutant, table

LINES, MUTANTS = table()
EDGES = ("node/exchange/downloader.py", "node/exchange/payload_checker.py", "coordinator/service.py")
MACHINES = ("protocol/member/member.py", "protocol/rounds/round_machine.py")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_and_its_tests_exist(mutant: Mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.file
    assert mutant.old != mutant.new
    assert mutant.breaks
    assert mutant.tests
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), test


def test_each_line_has_a_mutant_and_each_mutant_guards_a_line():
    assert {mutant.line for mutant in MUTANTS} == set(LINES)


def test_edges_have_as_many_mutants_as_machines():
    files = [mutant.file for mutant in MUTANTS]
    assert sum(map(files.count, EDGES)) >= sum(map(files.count, MACHINES))


@pytest.mark.parametrize("text", ["", "old\nold\n"], ids=["absent", "twice"])
def test_mutant_whose_text_is_not_unique_is_rejected(text: str, tmp_path: Path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="file contains the old text of name"):
        Mutant("name", "line", "breaks", "file", (), "old", "new").apply(tmp_path)
    assert (tmp_path / "file").read_text() == text


def test_mutant_applies_wherever_its_text_moved(tmp_path: Path):
    (tmp_path / "file").write_text("above\n    old\nbelow\n")
    Mutant("name", "line", "breaks", "file", (), "old", "new").apply(tmp_path)
    assert (tmp_path / "file").read_text() == "above\n    new\nbelow\n"
