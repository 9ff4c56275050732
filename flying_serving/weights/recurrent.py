"""Layers with recurrent state: the parts of their projections, and their convolutions.

A rank has the state of some heads. Its part of a projection has the rows of these heads in each
fused part, and those of the groups that the heads belong to. Ranks share a group as they share KV
heads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from flying_serving.errors import ConfigError, WeightError
from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.cuts import column_segments
from flying_serving.weights.storage import bias_part

_VIEW = "conv_weights"
"""A buffer of a Mamba 2 layer: its convolution's weight in two dimensions."""
_MULTIPLIERS = "mup_vector"
"""A buffer of Falcon-H1: a factor for each output of the projection, which each rank computes."""
OWN_BUFFERS = (_VIEW, _MULTIPLIERS)
_UNPACKED = "_cpu_unpacked_conv_weight"
"""An attribute in which vLLM keeps the weight of a convolution that it has packed for the CPU."""


def is_convolution(layer: Module) -> bool:
    """Return whether a layer has the weights of a convolution, (channels, 1, width), and no
    product.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, ColumnParallelLinear) or weight is None:
        return False
    return weight.dim() == 3 or hasattr(layer, _UNPACKED)  # a packed weight has two dimensions


class RecurrentLayers:
    """Convolutions of lane 1's model, and the cuts of layers that are not cut evenly.

    `widest`: engines of the widest group. Raises WeightError as `recurrent_segments`.
    """

    def __init__(self, model: Module, widest: int) -> None:
        self._widest = widest
        self._segments = recurrent_segments(model, widest)
        self._convolutions: dict[str, Module] = {}
        self._multipliers: dict[str, torch.Tensor] = {}
        self._copies: list[torch.Tensor] = []

    def segments(self, name: str, layer: Any) -> tuple[Segment, ...]:
        """Return the segments of a column-parallel layer of any kind. Raises WeightError if a part
        does not divide.
        """
        return self._segments.get(name) or column_segments(name, layer, self._widest)

    def take(self, model: Module) -> Iterator[tuple[str, Module]]:
        """Take the convolutions of lane 1's model, and yield its other modules by name."""
        for name, layer in model.named_modules():
            if is_convolution(layer):
                self._segments[name] = self.segments(name, layer)
                self._convolutions[name] = layer
                continue
            if hasattr(layer, _MULTIPLIERS):
                self._multipliers[name] = layer.mup_vector
            yield name, layer

    def bind(self, model: Module, rank: int, degree: int) -> Iterator[tuple[str, Module]]:
        """Bind the convolutions of a lane's model, and yield its other modules by name."""
        for name, layer in model.named_modules():
            full = self._convolutions.get(name)
            if full is None:
                if degree > 1 and hasattr(layer, _MULTIPLIERS):
                    self._take_multipliers(name, layer, rank, degree)
                yield name, layer
            elif degree > 1:
                mixer, segments = model.get_submodule(name.rpartition(".")[0]), self._segments[name]
                self._copies += bind_convolution(layer, mixer, full, segments, rank, degree)

    def _take_multipliers(self, name: str, layer: Any, rank: int, degree: int) -> None:
        """Take a rank's factors as they are. Raises WeightError if they are no part of lane 1's."""
        segments = self._segments[f"{name}.mamba.in_proj"]
        part = bias_part(self._multipliers[name].flatten(), segments, rank, degree)
        if not torch.equal(layer.mup_vector.flatten(), part):
            raise WeightError(f"{name}.{_MULTIPLIERS}: its factors are no part of lane 1's")
        self._copies.append(layer.mup_vector)


def recurrent_segments(model: Module, engines: int) -> dict[str, tuple[Segment, ...]]:
    """Return the segments of layers of lane 1's model that are not cut evenly, by name, for groups
    of up to `engines`.

    Raises:
        WeightError: naming a layer that is cut between ranks of one engine already, or whose heads
            do not divide.
    """
    found: dict[str, tuple[Segment, ...]] = {}
    for name, mixer in model.named_modules():
        for layer, sizes, heads in _parts(mixer):
            try:
                found[f"{name}.{layer}"] = segments_of(sizes, engines, heads)
            except ConfigError as error:
                raise WeightError(f"{name}.{layer}: {error}") from None
    return found


def _parts(mixer: Module) -> list[tuple[str, Sequence[int], Sequence[int]]]:
    """Return the name of each fused layer, the sizes of its parts, and how many heads or groups
    each part has.
    """
    if isinstance(mixer, MambaMixer2):
        if not isinstance(mixer.in_proj, MergedColumnParallelLinear):
            raise WeightError(f"{mixer.prefix}: ranks of an engine share a group of heads")
        ranks = mixer.tp_size
        heads, groups = mixer.num_heads // ranks, mixer.n_groups // ranks
        inner, state = mixer.intermediate_size // ranks, mixer.groups_ssm_state_size // ranks
        mixed = (inner, state, state), (heads, groups, groups)
        projected = (inner, *mixed[0], heads), (heads, *mixed[1], heads)
        return [("in_proj", *projected), ("conv1d", *mixed)]
    if isinstance(mixer, QwenGatedDeltaNetAttention):
        ranks = mixer.tp_size
        key, value = mixer.key_dim // ranks, mixer.value_dim // ranks
        key_heads, value_heads = mixer.num_k_heads // ranks, mixer.num_v_heads // ranks
        return [("conv1d", (key, key, value), (key_heads, key_heads, value_heads))]
    return []


def bind_convolution(
    layer: Any, mixer: Any, full: Any, segments: tuple[Segment, ...], rank: int, degree: int
) -> list[torch.Tensor]:
    """Give a convolution of a lane its rank's channels. Returns all tensors that it has then.

    Channels of several parts are copied: a few numbers each, which the kernel wants side by side.
    """
    channels = getattr(full, _UNPACKED, full.weight.data)
    channels = channels.reshape(channels.shape[0], 1, -1)
    part = bias_part(channels, segments, rank, degree)
    layer.weight = Parameter(part, requires_grad=False)
    tensors = [part]
    if layer.bias is not None:
        bias = bias_part(full.bias.data, segments, rank, degree)
        layer.bias = Parameter(bias, requires_grad=False)
        tensors.append(bias)
    if _VIEW in dict(mixer.named_buffers(recurse=False)):
        mixer.conv_weights = part.view(part.shape[0], -1)
    layer.quant_method.process_weights_after_loading(layer)  # packs it, as lane 1's
    unpacked = getattr(layer, _UNPACKED, None)
    return [*tensors, layer.weight.data, *([] if unpacked is None else [unpacked])]
