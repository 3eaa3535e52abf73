"""Tests of outer state that passes through a device in stretches: it has the same bits as outer state on that device."""

import pytest
import torch

from dilocox.node.outer import state_device
from dilocox.node.outer.state import StageState, rebase, start_phase
from dilocox.node.outer.state_device import HOST, Here, StateDevice, Through, passage_of
from dilocox.node.workers.environment import OuterState
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import manifest
from tests.property.test_codec import CODECS

CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[64, 1000, 1 << 22])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Through:
    """Return a passage with slots of this many elements: a tensor has many stretches, or one."""
    monkeypatch.setattr(state_device, "SLOT", request.param)
    return Through(CPU)


def two_rounds(run: Manifest, where: StateDevice) -> list[torch.Tensor]:
    """Return all tensors of a stage after two rounds with clipping, and its payloads."""
    state = StageState(run, 0, passage=where)
    state.committed.copy_(random(2, state.size, seed=0))
    live = [view.clone() for _, view in state.views(state.parameters)]
    rebase(state, live, keep_private=False)
    payloads = []
    for round in (1, 2):
        for tensor in live:
            tensor.add_(random(*tensor.shape, seed=round), alpha=1e-2)
        start_phase(state, live, private_share=0.5)
        raw = state.encode().raw
        state.return_to_feedback(memoryview(raw), shares=[0.25] * len(state.specs))
        state.apply([memoryview(raw)] * 2, [100, 300], factors=[[0.75] * len(state.specs), [1.0] * len(state.specs)])
        rebase(state, live)
        payloads.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    warm = [tensor for _, tensor in sorted(state.warm.items())]
    return [state.committed, state.feedback, state.anchor, *live, *warm, *payloads]


@pytest.mark.parametrize("compression", CODECS, ids=str)
def test_two_rounds_have_the_same_bits_through_slots(compression: dict[str, object], through: Through):
    run = manifest(model={"vocab_size": 64}, compression=compression, outer={"momentum": 0.9})
    for one, other in zip(two_rounds(run, HOST), two_rounds(run, through), strict=True):
        assert torch.equal(one, other)


def test_centered_clip_has_the_same_bits_through_slots(through: Through):
    run = manifest(model={"vocab_size": 64}, outer={"aggregate": "centered-clip"})
    for one, other in zip(two_rounds(run, HOST), two_rounds(run, through), strict=True):
        assert torch.equal(one, other)


def test_what_is_only_read_stays_as_it_is_and_what_is_changed_comes_back(through: Through):
    changed, read = random(5000, seed=1), random(5000, seed=2)
    expected, before = changed + read, read.clone()
    for stretch in through.each([changed], through.spans(5000), [read]):
        mine, theirs = stretch.parts
        mine.add_(theirs)
        theirs.zero_()
    assert torch.equal(changed, expected)
    assert torch.equal(read, before)


def test_the_device_holds_two_slots_however_many_stretches_there_are(monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    empty = torch.empty

    def counted(size: int, device: torch.device) -> torch.Tensor:
        held.append(size)
        return empty(size, device=device)

    monkeypatch.setattr(state_device, "SLOT", 10)
    monkeypatch.setattr(torch, "empty", counted)
    where, copies = Through(CPU), [torch.zeros(95), torch.zeros(95)]
    stops = [stretch.stop for stretch in where.each(copies[:1], where.spans(95), copies[1:])]
    assert stops == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
    assert held == [10] * 4


def test_nothing_passes_where_nothing_is():
    assert not list(Through(CPU).each([torch.zeros(0)], []))


def test_a_worker_on_cpus_computes_where_it_trains():
    assert {passage_of(placement, CPU) for placement in OuterState} == {HOST}
    assert isinstance(HOST, Here)
