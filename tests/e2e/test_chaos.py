"""Short form of `make chaos`: a minute of faults on real processes in network namespaces, beside a hostile unknown peer."""

from pathlib import Path

import pytest

from bench.chaos.__main__ import QUICK, chaos
from bench.chaos.network import lacking

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(bool(lacking()), reason=lacking() or "it can run here")
def test_a_run_goes_on_by_itself_whatever_happens_to_its_members(tmp_path: Path):
    """Check that every node is counted again at the end, without a manual repair."""
    verdict = chaos(tmp_path, QUICK).verdict
    assert list(verdict.helps) == []
    assert list(verdict.orphans) == []
    assert verdict.chains == 1
