"""Tests that the benches of large runs make statements as the rules require them, also after a new rule."""

import pytest

from bench import asking, scale


async def test_whoever_asks_a_run_is_answered_on_every_path():
    found = await asking.measure(rounds=12, clusters=8, stages=4)
    assert [one["path"] for one in found] == asking.paths(12)
    assert all(one["bytes"] for one in found)


@pytest.mark.parametrize("slow", [{"seconds": 0.3}, {"callback_seconds": 0.1}])
def test_who_waits_or_keeps_the_loop_for_long_misses_a_bar(slow: dict[str, float]):
    fine = {"path": "/", "seconds": 0.1, "callback_seconds": 0.01}
    assert not asking.missed([fine])
    (said,) = asking.missed([fine, {**fine, "path": "/metrics", **slow}])
    assert said.startswith("/metrics ")


async def test_a_commit_of_full_statements_is_made_and_verified():
    made = scale.commit_and_verify(50, 4)
    bare = scale.commit_and_verify(50, 4, options=False)["commit_bytes"]
    assert bare < made["commit_bytes"]
    assert {"claims", "contributions", "receipts", "reports"} <= made["bytes_of"].keys()
    told = await scale.coordinate(50, 4)
    assert told["roster"] >= 50
    again = await scale.restart(12, 8)
    said = {**made, **told, "longest_callback_seconds": 0.0}
    assert not scale.missed([{**said, "bare_commit_bytes": bare}], again)
    (missed,) = scale.missed([{**said, "bare_commit_bytes": scale.LARGEST_COMMIT_BYTES + 1}], again)
    assert "a commit of" in missed
