"""Every placement is a partition of the run's stages, and the chosen one is the fastest that fits."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dilocox.node.planning.layouts import choose, layouts
from dilocox.node.planning.memory_model import lacks
from dilocox.node.planning.step_model import KINDS
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import placements
from dilocox.protocol.run.manifest import Manifest, Schedule
from tests.helpers import manifest

HOSTS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
KIND = st.sampled_from(sorted(KINDS))


def run_of(stages: int, batch: int, microbatches: int = 0, schedule: Schedule = "1f1b", **model: int) -> Manifest:
    training = {"batch_size": batch, "microbatches": microbatches, "schedule": schedule}
    return manifest(model={"num_hidden_layers": 6, "stages": stages, **model}, training=training)


@given(HOSTS, st.integers(4, 8), st.integers(2, 24), st.sampled_from(["1f1b", "interleaved"]), st.booleans())
def test_placement_gives_every_stage_of_every_copy_one_worker(
    devices: list[int], stages: int, batch: int, schedule: Schedule, is_fixed: bool
):
    run = run_of(stages, batch, batch if is_fixed else 0, schedule)
    for place in placements(devices, run):
        hosts = range(len(devices))
        assert sorted(rank for host in hosts for rank in place.ranks(host)) == list(range(place.workers))
        hosted = [place.stages(host, stages) for host in hosts]
        assert sorted(stage for share in hosted for stage in share) == list(range(stages))
        assert all(len(place.ranks(host)) <= devices[host] for host in hosts)
        assert place.lengths[0] > 0, "the lead host has a part"
        assert batch % place.microbatches == 0
        assert place.microbatches == place.each * place.copies
        assert place.each >= place.length
        assert not is_fixed or (place.microbatches, place.recompute) == (batch, False)
        if schedule == "1f1b" or place.length == 1:
            assert [stage for share in hosted for stage in share] == list(range(stages))
        else:
            assert stages >= 2 * place.length
            assert place.each % (place.each // place.length) == 0, "torch's looped schedules need it"


def machines_of(devices: Sequence[int], memory: int) -> list[Devices]:
    return [Devices(count, cuda=True, device_bytes=memory) for count in devices]


@given(HOSTS, st.integers(1, 8), st.integers(1, 24), KIND, st.integers(1_000_000, 20_000_000))
def test_chosen_layout_is_the_fastest_that_fits(devices: list[int], stages: int, batch: int, name: str, memory: int):
    run, machines = run_of(stages, batch, hidden_size=128, intermediate_size=512), machines_of(devices, memory)
    found = choose(run, machines, KINDS[name])
    fitting = [each for each in layouts(run, machines, KINDS[name]) if not lacks(run, each.placement, machines)]
    assert bool(found.lacking) == (not fitting)
    if not fitting:
        return
    assert not lacks(run, found.best.placement, machines)
    roomy = [Devices(one.devices, True, int(0.92 * memory)) for one in machines]
    for other in fitting:
        tight = bool(lacks(run, other.placement, roomy))
        is_cut = found.best.is_uncut and not other.is_uncut
        fewer = found.best.is_uncut and other.placement.workers < found.best.placement.workers
        assert found.best.seconds <= other.seconds or tight or is_cut or fewer


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), KIND)
def test_model_that_fits_on_a_device_uses_every_device_that_divides_its_batch(
    devices: int, stages: int, factor: int, name: str
):
    found = choose(run_of(stages, devices * factor), machines_of([devices], 10**9), KINDS[name])
    assert (found.best.placement.copies, found.best.placement.length, found.best.placement.recompute) == (devices, 1, False)
    assert (found.idle, found.why_idle, found.best.parts.bubble) == (0, "", 0)


@given(HOSTS, st.integers(1, 8), st.integers(1, 24), KIND)
def test_runners_up_lose_for_a_reason(devices: list[int], stages: int, batch: int, name: str):
    found = choose(run_of(stages, batch), machines_of(devices, 3_000_000), KINDS[name])
    assert len(found.others) <= 3
    kinds = [found.best.kinship, *(other.kinship for other, _ in found.others)]
    assert len(set(kinds)) == len(kinds), "each differs in more than the microbatch"
    assert all(why for _, why in found.others)
