"""What the units of a layer's experts are given, and what stands for them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from flying_serving.worker.binding.methods import ExpertParts


class Spends:
    """A method of experts that uses up the routing weights, as vLLM's CPU kernel does when they apply to the input."""

    supports_eplb = True

    def apply(self, layer: nn.Module, x: torch.Tensor, topk_weights: torch.Tensor, **_: Any) -> torch.Tensor:
        product = x * topk_weights
        topk_weights.fill_(1.0)
        return product


def test_each_unit_gets_the_routing_weights_unspent() -> None:
    layers = [nn.Module() for _ in range(4)]
    for layer in layers:
        layer.apply_router_weight_on_input = True
    units = [(Spends(), layer) for layer in layers]
    x, weights = torch.ones(3, 2), torch.tensor([[0.5], [0.25], [0.125]])
    out = ExpertParts(units).apply(nn.Module(), x, topk_weights=weights, shared_experts=None)
    assert torch.equal(out, 4 * x * torch.tensor([[0.5], [0.25], [0.125]]))


def test_it_answers_for_its_first_unit_and_can_be_copied() -> None:
    """Copying and unpickling ask an object that holds nothing yet for `__setstate__`."""
    method = ExpertParts([(Spends(), nn.Module())])
    for same in (method, copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert same.supports_eplb
        with pytest.raises(AttributeError, match="no attribute 'unknown'"):
            _ = same.unknown
    with pytest.raises(AttributeError):
        _ = ExpertParts.__new__(ExpertParts).supports_eplb
