"""An inner step."""

import torch

from dilocox.node.training.model.trainer import Trainer
from tests.helpers import manifest

TOKENS = torch.arange(4 * 16).view(4, 16)


def test_what_is_added_up_over_all_ranks_is_asked_when_gradients_are_there_and_nothing_has_moved(process_group: None):
    trainer = Trainer(manifest())
    trainer.load_initial()
    parameters = [tensor for _, stage in trainer.live_stages() for tensor in stage.tensors()]
    before = [tensor.detach().clone() for tensor in parameters]
    asked = []

    def flags() -> list[float]:
        assert all(tensor.grad is not None for tensor in parameters)
        asked.append(all(torch.equal(old, new) for old, new in zip(before, parameters, strict=True)))
        return [3.0, 0.5]

    result = trainer.step(TOKENS, TOKENS, flags)
    assert asked == [True]
    assert list(result.flags) == [3.0, 0.5]
    assert not all(torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
