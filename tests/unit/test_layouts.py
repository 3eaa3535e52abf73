"""Placements of real runs on real hosts: no device without work, no pipeline without need."""

import pytest

from dilocox.cli.run.init import render_preset
from dilocox.node.planning.layouts import Choice, choose
from dilocox.node.planning.step_model import EFFICIENCY, KINDS, LAUNCH_SECONDS, Kind, flops_per_token, kind_of, parts_of
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, listed, placed
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import manifest


def preset(name: str) -> Manifest:
    return Manifest.from_toml(render_preset(name, name, "00" * 32))


def placed_on(run: Manifest, kind: str, *devices: int) -> Choice:
    machines = [Devices(count, cuda=True, device_bytes=int(KINDS[kind].memory)) for count in devices]
    return choose(run, machines, KINDS[kind])


@pytest.mark.parametrize("name", ["llama-125m", "llama-350m", "llama-1b"])
def test_eight_h100_all_work_without_a_bubble(name: str):
    found = placed_on(preset(name), "h100", 8)
    place = found.best.placement
    assert (place.copies, place.length, place.recompute, found.idle) == (8, 1, False, 0)
    assert found.best.parts.bubble == 0


@pytest.mark.parametrize(
    ("name", "kind", "devices", "shape"),
    [
        ("llama-1b", "4090", [4], (4, 1, False)),
        ("llama-7b", "h100", [8], (2, 4, False)),
        ("llama-7b", "4090", [8], (1, 8, True)),
        ("llama-1b", "h100", [8, 8], (8, 2, False)),
    ],
)
def test_pipeline_is_as_long_as_memory_and_hosts_require(
    name: str, kind: str, devices: list[int], shape: tuple[int, int, bool]
):
    found = placed_on(preset(name), kind, *devices)
    place = found.best.placement
    assert (place.copies, place.length, place.recompute) == shape
    assert not found.lacking
    assert found.idle == 0


def test_hosts_have_stretches_of_the_pipeline_and_all_copies_of_them():
    place = Placement((2, 2), 2, "1f1b", 16)
    assert [place.ranks(host) for host in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [place.stages(host, 4) for host in range(2)] == [[0, 1], [2, 3]]
    unequal = Placement((8, 2), 1, "1f1b", 16)
    assert [len(unequal.stages(host, 80)) for host in range(2)] == [64, 16]
    looped = Placement((2, 2), 1, "interleaved", 8)
    assert [listed(looped.stages(host, 8)) for host in range(2)] == ["0-1, 4-5", "2-3, 6-7"]
    longest = Placement((1,) * 64, 1, "interleaved", 64)
    assert longest.stages(0, 1024) == [*range(8), *range(512, 520)], "two turns fill a layout"


def test_devices_without_work_are_reported_with_a_remedy():
    found = placed_on(manifest(training={"batch_size": 4, "microbatches": 0}), "h100", 8)
    assert (found.idle, found.best.placement.copies) == (4, 4)
    assert "idle: 4 of 8 devices" in found.why_idle
    assert "Set training.batch_size" in found.sentences()[-1]


def test_batch_that_no_number_of_copies_divides_is_a_pipeline_s():
    run = preset("llama-350m")
    odd = run.model_copy(update={"training": run.training.model_copy(update={"batch_size": 7})})
    found = placed_on(odd, "4090", 4)
    assert found.best.placement.length > 1
    assert found.best.seconds < min(other.seconds for other, _ in found.others)


def test_run_that_fixes_its_microbatches_leaves_only_the_shape_to_nodes():
    run = manifest(training={"batch_size": 8, "microbatches": 4, "checkpoint_activations": True})
    place = placed_on(run, "h100", 8).best.placement
    assert (place.copies, place.microbatches, place.recompute) == (4, 4, True)
    assert placed(run, 8, recompute=False) is run


def test_placed_run_keeps_its_id_and_takes_the_choices_of_the_node():
    run = manifest(training={"batch_size": 8, "microbatches": 0})
    trained = placed(run, 4, recompute=True)
    assert (trained.training.microbatches, trained.training.checkpoint_activations) == (4, True)
    assert trained.run_id == run.run_id
    assert (run.training.microbatches, run.training.checkpoint_activations) == (0, False)


def test_model_that_fits_nowhere_is_reported_with_the_least_that_it_needs():
    found = placed_on(preset("llama-7b"), "4090", 4)
    assert not found.others
    assert found.lacking[0].needs > found.lacking[0].has == 24e9
    assert found.best.placement.recompute
    assert found.best.placement.length == 4


def test_run_with_audits_fixes_its_microbatches():
    with pytest.raises(ValueError, match=r"audit\.segments needs training\.microbatches"):
        manifest(training={"microbatches": 0}, audit={"segments": 2})
    with pytest.raises(ValueError, match="checkpoint_activations needs microbatches"):
        manifest(training={"microbatches": 0, "checkpoint_activations": True})


def test_parts_of_a_step_add_up_to_what_each_costs():
    """Compare each part with its definition, for two copies of a pipeline of two."""
    run, kind = preset("llama-350m"), KINDS["h100"]
    whole = parts_of(run, Placement((1,), 1, "1f1b", 4), kind)
    assert whole.products == pytest.approx(run.tokens_per_step * flops_per_token(run) / (EFFICIENCY * kind.peak))
    assert [whole.bubble, whole.reduction, whole.imbalance, whole.launching] == pytest.approx([0, 0, 0, 0])
    again = parts_of(run, Placement((1,), 1, "1f1b", 4, recompute=True), kind)
    assert again.recomputation == pytest.approx(whole.products / 3, rel=0.1), "all but the head"
    cut = parts_of(run, Placement((2,), 2, "1f1b", 8), kind)
    working = cut.products + cut.imbalance + cut.launching
    assert cut.bubble == pytest.approx(working * 1 / 4), "one worker waits, four microbatches a copy"
    assert cut.optimizer < whole.optimizer
    assert cut.reduction > 0
    small = parts_of(run, Placement((1,), 1, "1f1b", 64), Kind.of_peak(1e18))
    assert small.products + small.launching == pytest.approx(24 * 64 * LAUNCH_SECONDS)
    step = cut.step(activations=0.5)
    assert step.seconds == pytest.approx(max(0.5, cut.total))
    assert step.activations == 0.5
    assert step.working == pytest.approx(cut.total)


def test_kind_of_a_host_is_the_nearest_by_memory():
    assert kind_of(Devices(8, cuda=True, device_bytes=25_757_220_864)).memory == 24e9
    assert kind_of(Devices(8, cuda=True, device_bytes=int(143e9))) == KINDS["h200"]
    assert kind_of(Devices(8, cuda=True)).memory == 80e9
    assert kind_of(Devices(8)).peak < 1e12
