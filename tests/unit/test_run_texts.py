"""Run files that benches write out in full are run files."""

import pytest

import bench.chaos.__main__ as chaos
from bench import restart, strangers
from bench.texts import stdlib
from dilocox.protocol.manifest import Manifest
from tests.helpers import identity


@pytest.mark.parametrize("bench", [chaos, restart, strangers])
def test_a_bench_s_run_is_one(bench: object):
    """One of them was not for weeks: it takes half an hour, so that nobody ran it."""
    text = stdlib().into(bench.RUN)  # type: ignore[attr-defined]
    run = text.replace("{owner}", identity(0).key.hex()).replace("{peers}", "4")
    assert Manifest.from_toml(run).data.digest == stdlib().digest
