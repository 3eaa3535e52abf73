"""Streaming DiLoCo: fragments that have their turns, on the product's outer state."""

from collections import Counter
from typing import Any

import pytest
import torch

from bench.arms import ARMS
from bench.lab import Lab
from bench.sections import model_section
from bench.streaming import Streaming, fragment_of, turns
from dilocox.node.planning.time_model import Line, Method, Site, Step, exchange_seconds
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_tensors

H = 4


def run_of(total_steps: int = 3 * H, **settings: dict[str, Any]) -> Manifest:
    merged = ARMS["AllReduce"].manifest({}, total_steps, 0).model_dump()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    merged["model"] = model_section(shape, merged["model"])
    merged["rounds"] |= {"overlap": "none", "inner_steps": H, "max_inner_steps": H, "count": total_steps // H}
    merged["training"] |= {"warmup_steps": 1}
    merged["compression"] = {"codec": "fp32"}
    merged["outer"] |= {"learning_rate": 0.7, "momentum": 0.9}
    for name, section in settings.items():
        merged[name] |= section
    return Manifest.model_validate(merged)


def site_of(run: Manifest, exchange: float) -> Site:
    """Return a site on which the whole model's exchange in fp32 lasts `exchange` steps."""
    size = 4 * parameter_count(run.model)
    one = Site(parameter_count(run.model), Step(1.0), 1.0, 2, Line.both_ways(1.0))
    return Site(one.parameters, one.step, 1.0, 2, Line.both_ways(exchange_seconds(one, Method("", size, H, H)) / exchange))


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_each_fragment_has_a_turn_in_each_round_and_the_last_ones_come_together(fragments: int):
    total = 5 * 8
    by_step = {step: list(turns(step, 8, fragments, total)) for step in range(1, total + 1)}
    assert Counter(fragment for each in by_step.values() for fragment in each) == dict.fromkeys(range(fragments), 5)
    assert by_step[total] == list(range(fragments))
    assert [step for step in by_step if 0 in by_step[step]][:2] == [8 // fragments, 8 + 8 // fragments]
    assert max(len(each) for step, each in by_step.items() if step < total) == 1, "never two before the end"


def test_fragments_are_layers_in_strides():
    specs = stage_tensors(run_of().model, 0)
    of = {spec.name: fragment_of(spec, 2) for spec in specs}
    assert {of[name] for name in of if ".layers.0." in name or ".layers.2." in name or "embed" in name} == {0}
    assert {of[name] for name in of if ".layers.1." in name or name in ("model.norm.weight", "lm_head.weight")} == {1}


def test_one_fragment_that_arrives_at_once_and_replaces_the_live_one_is_diloco():
    run = run_of()
    lab = Lab(run, 1).rounds()
    (theta,) = lab.trainers[0].committed
    streaming = Streaming(run, 1, 1, mixed=0.0).train()
    assert torch.equal(streaming.state(), theta)
    assert torch.equal(Streaming(run, 1, 1, mixed=None).train().state(), theta), "a rebase at once is that, too"
    assert streaming.points[-1].wire_bytes == lab.points[-1].wire_bytes


def test_fragments_are_exchanged_at_their_own_turns():
    run = run_of()
    whole, halves = Streaming(run, 2, 1, mixed=0.0).train(), Streaming(run, 2, 2, mixed=0.0).train()
    headers = 1024
    assert halves.wire_bytes == pytest.approx(whole.wire_bytes, abs=headers)
    assert halves.points[-1].loss != whole.points[-1].loss
    assert all(state.size for state in halves.states[0])
    assert sum(state.size for state in halves.states[0]) == parameter_count(run.model)


def test_a_live_fragment_becomes_a_mean_of_itself_and_the_averaged_one():
    run = run_of(outer={"learning_rate": 1.0, "momentum": 0.0})
    streaming = Streaming(run, 2, 1, mixed=0.25)
    for cluster, change in enumerate((1e-3, 3e-3)):
        for live in streaming.live(cluster, 0):
            live.add_(change)
    before = streaming.states[0][0].parameters.clone()
    streaming.send(0)
    streaming.land()
    theta = streaming.states[0][0].parameters
    assert torch.allclose(theta, before + 2e-3, atol=1e-6), "the mean of what they did"
    assert torch.equal(theta, streaming.states[1][0].parameters)
    live = torch.cat([each.flatten() for each in streaming.live(1, 0)])
    assert torch.allclose(live, 0.25 * (before + 3e-3) + 0.75 * theta, atol=1e-6)


def test_exchanges_follow_each_other_on_the_line_and_a_fragment_waits_for_its_own():
    run = run_of()
    hidden = Streaming(run, 2, 2, None, site=site_of(run, H / 2)).train()
    assert hidden.now == pytest.approx(3 * H + H / 2, abs=0.5), "but for the last exchange"
    slow = Streaming(run, 2, 2, None, site=site_of(run, 4 * H)).train()
    assert slow.now == pytest.approx(3 * 4 * H, rel=0.35), "as the line moves three of the whole model"
    assert slow.now >= 3 * 4 * H
    assert slow.wire_bytes == hidden.wire_bytes
