"""Test of the last line of a test run."""

from tests.conftest import left_out


def test_reasons_are_counted_and_the_most_frequent_is_first():
    assert left_out(["no GPU", "no etcd", "no GPU"], 7) == (
        "left out: 2 skipped (no GPU); 1 skipped (no etcd); 7 for `make test-all`"
    )
    assert left_out([], 0) == "left out: nothing"
