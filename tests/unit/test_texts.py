"""Tests of the benches' text, which is in the folder of the operator's data."""

from pathlib import Path

import pytest

from bench.texts import stdlib


def test_the_standard_library_lies_in_the_home_that_is_ours_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reproduce a fault: a text made for another home was returned here, and testnets found nothing in their own."""
    elsewhere = stdlib()
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    here = stdlib()
    assert here.folder.is_relative_to(tmp_path)
    assert (here.folder / here.digest).exists()
    assert here.digest == elsewhere.digest
    assert stdlib() is here
