"""Bind what vLLM does not cut by a layer class of its own: norms, scales, sinks, routers, and every buffer.

A lane's model is built with parameters on the meta device and buffers as the model computes them. Afterwards each of
its tensors is lane 1's or a view of it, or the lane is refused: a tensor that nobody bound is uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from vllm.model_executor.layers.linear import ReplicatedLinear

from flying_serving.errors import WeightError


def own_tensors(module: Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module itself, not of those below it, by name."""
    options = {"recurse": False, "remove_duplicate": False}
    return dict([*module.named_parameters(**options), *module.named_buffers(**options)])


def bind_whole(
    name: str, layer: Module, full: Module | None, rank: int, degree: int, but: Collection[str] = ()
) -> None:
    """Let a layer's parameters and buffers be lane 1's, or this rank's part where the model itself has cut them.

    Args:
        name: the layer's name in the model.
        layer: of a lane's model.
        full: the layer of that name in lane 1's model.
        rank: this engine's place in the group.
        degree: engines in the group.
        but: names of tensors that are bound already.

    Raises:
        WeightError: naming a tensor that is neither.
    """
    replicated = isinstance(layer, ReplicatedLinear)  # vLLM itself may have packed its weight, which then has no shape
    if replicated and full is not None:
        layer.__dict__.update({k: v for k, v in full.__dict__.items() if k == "cpu_linear"})
    theirs = {} if full is None else own_tensors(full)
    parameters = {key for key, _ in layer.named_parameters(recurse=False)}
    for key, mine in own_tensors(layer).items():
        if key in but:
            continue
        if key not in theirs:
            raise WeightError(f"{name}.{key}: lane 1 has no tensor of this name")
        if mine is theirs[key]:
            continue
        full_tensor = theirs[key].detach()
        part = full_tensor if replicated else part_of(f"{name}.{key}", full_tensor, mine.shape, rank, degree)
        if key in parameters:
            swap_tensors(mine, Parameter(part, requires_grad=False))  # attention layers and experts may hold it too
        elif part.shape == theirs[key].shape or torch.equal(part, mine):
            setattr(layer, key, part)
        else:  # the model computed it from its rank: then it must be the part that was cut out
            raise WeightError(f"{name}.{key}: what a lane computes is no part of what lane 1 has")


def part_of(name: str, full: torch.Tensor, shape: torch.Size, rank: int, degree: int) -> torch.Tensor:
    """A view of `full` in this shape: all of it, or in one dimension the rank's part.

    Fewer parts than ranks are shared by neighbouring ranks, as vLLM replicates KV heads.

    Raises:
        WeightError: naming the tensor, if no cut along one dimension has this shape.
    """
    if full.shape == shape:
        return full
    cut = [d for d, (have, want) in enumerate(zip(full.shape, shape, strict=False)) if have != want]
    if full.dim() == len(shape) and len(cut) == 1 and shape[cut[0]]:
        parts, rest = divmod(full.shape[cut[0]], shape[cut[0]])
        if not rest and parts and degree % parts == 0:
            return full.narrow(cut[0], rank * parts // degree * shape[cut[0]], shape[cut[0]])
    raise WeightError(f"{name}: shape {tuple(shape)} in a lane is no part of {tuple(full.shape)} in lane 1")


def refuse_foreign(model: Module, storages: Set[int]) -> None:
    """Raise WeightError for the first tensor of a lane's model that has no data, or data of its own.

    Args:
        model: bound.
        storages: addresses of the storages that lanes share.
    """
    for name, layer in model.named_modules():
        for key, tensor in own_tensors(layer).items():
            if tensor.is_meta:
                raise WeightError(f"{name}.{key}: no shared storage for this parameter")
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in storages:
                raise WeightError(f"{name}.{key}: has memory of its own, which nothing was loaded into")
        _refuse_meta_attributes(name, layer)


def _refuse_meta_attributes(name: str, layer: Module) -> None:
    """What a layer or its attention backend keeps as a plain attribute is computed, never loaded."""
    owners: tuple[Any, ...] = (layer, getattr(layer, "impl", None))
    for owner in owners:
        for key, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise WeightError(f"{name}.{key}: depends on weights that are not there while a lane is built")
