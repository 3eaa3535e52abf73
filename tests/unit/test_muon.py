"""Tests of the product's Muon against torch.optim.Muon, whose step it is."""

import pytest
import torch
from torch import nn

from dilocox.node.training.model import muon
from dilocox.node.training.model.mesh import Mesh

SHAPES = [(48, 48), (48, 48), (32, 96), (96, 32), (32, 96), (1, 40)]


def parameters(seed: int = 0) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


@pytest.mark.parametrize(("product", "off"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-3)])
def test_a_hundred_steps_end_where_torch_s_muon_ends(monkeypatch: pytest.MonkeyPatch, product: torch.dtype, off: float):
    monkeypatch.setattr(muon, "product_type", lambda device: product)
    ours, theirs = parameters(), parameters()
    start = [value.detach().clone() for value in ours]
    mine = muon.Muon(ours, 0.005, 0.1, 0.9, Mesh())
    other = torch.optim.Muon(theirs, lr=0.005, weight_decay=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(1)
    for _ in range(100):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=random) + a.detach()
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b, before in zip(ours, theirs, start, strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) < off
        assert float((a.detach() - before).norm() / before.norm()) > 0.02, "it moved"


def test_stacks_orthogonalise_each_matrix_by_itself():
    random = torch.Generator().manual_seed(2)
    stack = torch.randn(3, 24, 40, generator=random)
    together = muon.orthogonalize(stack)
    for one, matrix in zip(together, stack, strict=True):
        alone = muon.orthogonalize(matrix[None])[0]
        assert torch.allclose(one.float(), alone.float(), atol=2e-2)
    values = torch.linalg.svdvals(together.float())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
