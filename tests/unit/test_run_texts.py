"""Run files that benches write out in full are run files."""

import pytest

import bench.chaos.__main__ as chaos
from bench import boundary, codec, restart, strangers
from bench.texts import stdlib
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_tensors
from tests.helpers import identity


@pytest.mark.parametrize("bench", [chaos, restart, strangers])
def test_a_bench_s_run_is_one(bench: object):
    """Reproduce a fault: one was invalid for weeks, because it takes half an hour and was never run."""
    text = stdlib().into(bench.RUN)  # type: ignore[attr-defined]
    run = text.replace("{owner}", identity(0).key.hex()).replace("{peers}", "4")
    assert Manifest.from_toml(run).data.digest == stdlib().digest


def test_a_bench_s_model_is_one():
    for shape in codec.SHAPES:
        assert codec.manifest(shape).rounds.inner_steps == shape.inner_steps
    for size, millions in zip((*boundary.SHAPES, *boundary.QUICK), (100, 350, 10), strict=True):
        for compression in boundary.CODECS.values():
            model = boundary.manifest(size, compression).model
            parameters = sum(spec.elements for stage in range(model.stages) for spec in stage_tensors(model, stage))
            assert parameters == pytest.approx(1e6 * millions, rel=0.1), size.name


@pytest.mark.parametrize("asked", [["--models", "100M,1B"], ["--models", "100M", "--quick"]])
def test_a_boundary_of_a_model_that_is_not_there_is_an_error(asked: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        boundary.main(asked)
    assert ended.value.code == 2
    assert "model" in capsys.readouterr().err
