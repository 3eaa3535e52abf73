"""The patches of `make mutants` are of this tree: one that no longer applies tests nothing, and nobody runs all of them often."""

import subprocess

import pytest

from tests.mutants.__main__ import PATCHES, ROOT, header


@pytest.mark.parametrize("name", sorted(path.stem for path in PATCHES.glob("*.patch")))
def test_a_mutant_applies_and_its_tests_are_there(name: str):
    patch = PATCHES / f"{name}.patch"
    done = subprocess.run(["git", "apply", "--check", "-p1", str(patch)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, tests = header(patch)
    assert told
    assert tests
    for test in tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not function or f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(), test
