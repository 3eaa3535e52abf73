"""Disk that shards take, and what `dilocox check` finds of them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dilocox.cli.run.init import render_preset
from dilocox.node.exchange.shards import find_shards
from dilocox.node.planning import disk_model, memory_model
from dilocox.node.planning.disk_model import Written
from dilocox.node.preflight import machine
from dilocox.node.preflight.machine import Here, Role
from dilocox.protocol.run.manifest import Availability, Manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.protocol.run.tensors import state_bytes
from dilocox_availability.disk import rounds_shared, state_is_shared
from tests.helpers import manifest

WIDE: dict[str, Any] = {"compression": {"codec": "fp32", "rank": None}, "rounds": {"snapshot_every": 4}}
"""Payloads are as large as what they stand for."""
RUN = manifest(**WIDE)
WEIGHTS = memory_model.stage_bytes(RUN, range(RUN.model.stages), half=False).weights


def written(run: Manifest, clusters: int) -> Written:
    return disk_model.written(run, clusters, shards=find_shards(run))


def test_who_keeps_shares_writes_a_part_of_everybody_s_payload_and_of_states():
    """Check a code in which any four of eight restore: a quarter of four bytes of every payload, and of eight of a state
    every fourth round."""
    kept = manifest(**WIDE, availability={"needed_share": 0.5})
    each, without = written(kept, 8), disk_model.written(RUN, 8)
    assert each.shards == pytest.approx(8 * WEIGHTS / 4 + 2 * WEIGHTS / 4 / 4, rel=0.02)
    assert each.in_a_round(1, 0) == without.in_a_round(1, 0) + each.shards
    assert written(kept, 1).shards == 0
    assert disk_model.disk_bytes(kept, 8) == disk_model.disk_bytes(RUN, 8) + 4096 * 10**6


def test_no_more_shares_are_written_than_are_kept():
    kept = manifest(**WIDE, availability={"needed_share": 0.5, "megabytes": 1})
    assert written(kept, 100).shards < 10**6 < 200 * WEIGHTS / 16
    assert written(kept, 200).shards == pytest.approx(10**6, rel=0.05)


def test_rounds_whose_shares_have_room_by_hand():
    """Check eight quarters of a payload each round, in half of the space, for at most the run's number of rounds."""

    def rounds(megabytes: int, clusters: int = 8) -> int:
        kept = manifest(**WIDE, availability={"needed_share": 0.5, "megabytes": megabytes, "rounds": 100})
        return rounds_shared(kept, clusters)

    assert rounds(4) == 2 * 10**6 // (2 * WEIGHTS)
    assert (rounds(4096), rounds(4096, 1), rounds(1, 100)) == (100, 0, 0)
    assert rounds_shared(RUN, 8) == 0


def test_a_state_s_share_has_half_of_the_room():
    """Check two clusters, whose shard is all of Θ and momentum, and four clusters with half of it."""
    wide = {
        **WIDE,
        "model": {
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "vocab_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    }
    states = sum(state_bytes(manifest(**wide).model, stage) for stage in range(manifest(**wide).model.stages))

    def fits(megabytes: int, clusters: int = 2) -> bool:
        return state_is_shared(manifest(**wide, availability={"megabytes": megabytes}), clusters)

    half = states // 500_000
    assert (fits(half), fits(half + 1), fits(half // 2 + 1, 4), fits(1 << 20, 1)) == (False, True, True, False)
    assert not state_is_shared(RUN, 8)


def found(run: Manifest, home: Path, role: Role = Role.NODE) -> list[Finding]:
    """Return what `check` finds of shards on this machine."""
    here = Here(home, "127.0.0.1", 0, None, {}, None, role=role)
    return [each for each in machine.of_machine(run, here) if each.about in ("availability", "shards")]


def test_node_without_the_coder_is_told_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = manifest(availability={}, rounds={"start_clusters": 1, "min_clusters": 1})
    assert [each.level for each in found(run, tmp_path)] == [Level.FINE], "a single cluster shares with no other"
    monkeypatch.setitem(sys.modules, "pyeclib.ec_iface", None)
    [missing] = found(run, tmp_path)
    assert (missing.level, "pip install pyeclib" in missing.says) == (Level.WRONG, True)
    assert found(manifest(), tmp_path) == found(run, tmp_path, Role.RELAY) == []


@pytest.mark.parametrize(
    ("preset", "settings", "level", "rounds", "has"),
    [
        ("qwen1.5-107b", {}, Level.ODD, 0, "too few"),
        ("llama-1b", {"megabytes": 3000}, Level.ODD, 2, "too few"),
        ("llama-350m", {}, Level.ODD, 11, "of no state"),
        ("llama-125m", {}, Level.FINE, 32, "of a state"),
    ],
)
def test_run_without_room_for_its_shards_is_odd(
    tmp_path: Path, preset: str, settings: dict[str, int], level: Level, rounds: int, has: str
):
    run = Manifest.from_toml(render_preset(preset, "n", "00" * 32))
    run = run.model_copy(update={"availability": Availability(**settings)})
    [_, room] = found(run, tmp_path)
    assert (room.level, f"{rounds} rounds" in room.says, has in room.says) == (level, True, True)
