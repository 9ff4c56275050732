"""What stands for layers in a lane: what units of experts are given, and what is asked before
weights are read.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flying_serving.errors import IntegrityError
from flying_serving.weights.methods import ExpertParts, VocabularyPart


class Spends:
    """A method of experts that uses up the routing weights, as vLLM's CPU kernel does when they
    apply to the input.
    """

    supports_eplb = True

    def apply(
        self, layer: nn.Module, x: torch.Tensor, topk_weights: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        product = x * topk_weights
        topk_weights.fill_(1.0)
        return product


def nothing() -> None:
    """Every unit is there."""


def lent() -> None:
    raise IntegrityError("lent")


def test_each_unit_gets_the_routing_weights_unspent() -> None:
    layers = [nn.Module() for _ in range(4)]
    for layer in layers:
        layer.apply_router_weight_on_input = True
    units = [(Spends(), layer) for layer in layers]
    x, weights = torch.ones(3, 2), torch.tensor([[0.5], [0.25], [0.125]])
    out = ExpertParts(units, nothing).apply(
        nn.Module(), x, topk_weights=weights, shared_experts=None
    )
    assert torch.equal(out, 4 * x * torch.tensor([[0.5], [0.25], [0.125]]))


def test_bound_weight_answers_for_its_first_unit_and_can_be_copied() -> None:
    """Copying and unpickling ask an object that holds nothing yet for `__setstate__`."""
    method = ExpertParts([(Spends(), nn.Module())], nothing)
    for same in (
        method,
        copy.copy(method),
        copy.deepcopy(method),
        pickle.loads(pickle.dumps(method)),
    ):
        assert same.supports_eplb
        with pytest.raises(AttributeError, match="no attribute 'unknown'"):
            _ = same.unknown
    with pytest.raises(AttributeError):
        _ = ExpertParts.__new__(ExpertParts).supports_eplb


def test_reader_of_raw_weights_asks_for_each_unit_first() -> None:
    """Each of the units, the look-up, and logits that nobody has a product for."""
    vocabulary, layer = VocabularyPart(None, lent), nn.Embedding(4, 2)
    reads: list[Callable[[], torch.Tensor]] = [
        lambda: vocabulary.embedding(layer, torch.tensor([1])),
        lambda: vocabulary.apply(layer, torch.ones(1, 2)),
        lambda: ExpertParts([(Spends(), nn.Module())], lent).apply(nn.Module(), torch.ones(1, 2)),
    ]
    for read in reads:
        with pytest.raises(IntegrityError):
            read()
