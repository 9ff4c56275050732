"""Activations whose result depends on how many columns of a layer a rank has.

In a group such a model computes other values than on one engine, as it does in vLLM at each degree.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.activation import GeluAndMulSparse

BY_WIDTH = (GeluAndMulSparse,)
"""Activations of (..., 2 * d) to (..., d), gates first. The sparse one drops gates by their mean
and standard deviation over d.
"""


def activations_by_width(model: Module) -> list[Module]:
    """Return the activations of a model that depend on the width of a rank."""
    return [module for module in model.modules() if isinstance(module, BY_WIDTH)]


def degrees_differ(model_config: Any) -> bool:
    """Return whether a model has such activations, by its configuration (Gemma 3n)."""
    pattern = getattr(model_config.hf_text_config, "activation_sparsity_pattern", None)
    return any(pattern or ())


@contextmanager
def widths_of_ranks(model: Module, ranks: int) -> Iterator[None]:
    """While the body runs, such activations of a whole model see the columns of each of `ranks`
    ranks apart.
    """
    with ExitStack() as stack:
        for module in activations_by_width(model):
            stack.callback(module.register_forward_pre_hook(partial(_parted, ranks)).remove)
            stack.callback(module.register_forward_hook(_joined).remove)
        yield


def _parted(ranks: int, _module: Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Turn (..., 2 * d) into (..., ranks, 2 * d / ranks), gates first for each rank."""
    (x,) = args
    return x.unflatten(-1, (2, ranks, -1)).transpose(-3, -2).flatten(-2)


def _joined(_module: Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
    """Turn (..., ranks, d / ranks) into (..., d)."""
    return out.flatten(-2)
