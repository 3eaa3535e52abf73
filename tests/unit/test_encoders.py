"""Encodings of the bench. SparseLoCo: the largest values of each group are sent, and what stays decays."""

import torch

from bench.encoders import DECAY, SparseLoCoState
from dilocox.node.outer import codec
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.payload.arrays import GROUP
from tests.helpers import manifest

K = 300


def test_each_group_sends_its_largest_values_and_the_rest_decays():
    run = manifest(model={"hidden_size": 64, "intermediate_size": 128}, compression={"codec": "topk-int2", "k": K})
    state = SparseLoCoState(run, 1)
    state.feedback.normal_(generator=torch.Generator().manual_seed(0))
    before = state.feedback.clone()
    parsed = wire.parse(state.encode().raw, state.layout())
    for (_, owed), (_, left), packed in zip(state.views(before), state.views(state.feedback), parsed, strict=True):
        sent = codec.Decoder([packed], torch.device("cpu")).weighted_sum([1.0], 0, owed.numel()).float()
        for values, of_group in zip(owed.flatten().split(GROUP), sent.split(GROUP), strict=True):
            kept = K * len(values) // GROUP
            assert set(of_group.nonzero().flatten().tolist()) == set(values.abs().topk(kept).indices.tolist())
        assert torch.allclose(left.flatten(), DECAY * (owed.flatten() - sent), atol=1e-6)
