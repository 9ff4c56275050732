"""Layers with recurrent state: the parts of their projections, and their convolutions.

A rank has the state of some heads. Its part of a projection has the rows of these heads in each
fused part, and those of the groups that the heads belong to. Ranks share a group as they share KV
heads.
"""

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.formats import is_quantized
from flying_serving.weights.linear import ColumnParallel, by_heads
from flying_serving.weights.plain import Whole
from flying_serving.weights.rule import Layer
from flying_serving.weights.storage import bias_part
from flying_serving.weights.store import Store

_VIEW = "conv_weights"
"""A buffer of a Mamba 2 layer: its convolution's weight in two dimensions."""
_UNPACKED = "_cpu_unpacked_conv_weight"
"""An attribute in which vLLM keeps the weight of a convolution that it has packed for the CPU."""
_Parts = tuple[tuple[int, ...], tuple[int, ...]]
"""The sizes of the fused parts of a layer, and how many heads, or groups of heads, each has."""


class RecurrentColumn(ColumnParallel):
    """A layer whose fused parts have heads, and groups of them that are fewer."""

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        return _parts_of(layer) is not None

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        parts = _parts_of(layer)
        if parts is None:
            return super().cut(layer, engines)
        sizes, heads = parts
        return by_heads(layer.name, sizes, engines, heads)


class Convolution(RecurrentColumn):
    """The weights of a convolution, (channels, 1, width), which has no product.

    Channels of several parts are copied: a few numbers each, which the kernel wants side by side.
    """

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        weight = getattr(layer.module, "weight", None)
        if not isinstance(layer.module, cls.of) or weight is None:
            return False
        # a packed weight has two dimensions
        return weight.dim() == 3 or hasattr(layer.module, _UNPACKED)

    def take(self, store: Store) -> None:
        self.segments = self.cut(self.layer, store.widest)

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Rule`. A lane has its rank's channels."""
        if degree == 1:
            return
        module, full = layer.module, self.full
        channels = getattr(full, _UNPACKED, full.weight.data)
        part = self._part(channels.reshape(channels.shape[0], 1, -1), rank, degree)
        module.weight = Parameter(part, requires_grad=False)
        if module.bias is not None:
            bias = self._part(full.bias.data, rank, degree)
            module.bias = Parameter(bias, requires_grad=False)
        for mixer in layer.owners.values():
            if _VIEW in dict(mixer.named_buffers(recurse=False)):
                mixer.conv_weights = part.view(part.shape[0], -1)
        module.quant_method.process_weights_after_loading(module)  # packs it, as lane 1's
        self.made += [module.weight.data, getattr(module, _UNPACKED, None)]

    def _part(self, full: torch.Tensor, rank: int, degree: int) -> torch.Tensor:
        part = bias_part(full, self.segments, rank, degree)
        self.made.append(part)
        return part


class Mamba(Whole):
    """The mixer of a Mamba 2 layer. Its convolution binds the view of its weight."""

    of = MambaMixer2
    bound = (_VIEW,)

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        """See `Rule`. Nothing of its own is cut. Raises WeightError if its projection cannot be."""
        name, projection = f"{layer.name}.in_proj", layer.module.in_proj
        if engines > 1 and is_quantized(projection):
            raise WeightError(f"{name}: a quantized layer with groups of heads cannot be cut yet")
        if not isinstance(projection, MergedColumnParallelLinear):
            raise WeightError(f"{name}: ranks of an engine share a group of heads")
        return ()


class Multiplied(Whole):
    """A layer of Falcon-H1, with a factor for each output of the projection, which each rank
    computes.
    """

    bound = ("mup_vector",)

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        return hasattr(layer.module, "mup_vector")

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Whole`. Raises WeightError if a lane's factors are no part of lane 1's."""
        mixer, factors = self.full.mamba, layer.module.mup_vector
        projection = Layer(self.name, mixer.in_proj, {"": mixer}, layer.model)
        segments = RecurrentColumn.cut(projection, degree)
        part = bias_part(self.full.mup_vector.flatten(), segments, rank, degree)
        if not torch.equal(factors.flatten(), part):
            raise WeightError(f"{self.name}.mup_vector: its factors are no part of lane 1's")
        self.made.append(factors)
        super().bind(layer, rank, degree)


def _parts_of(layer: Layer) -> _Parts | None:
    """Return the parts of a layer that is not cut evenly; None for all others."""
    for mixer in layer.owners.values():
        if isinstance(mixer, MambaMixer2):
            ranks = mixer.tp_size
            heads, groups = mixer.num_heads // ranks, mixer.n_groups // ranks
            inner, state = mixer.intermediate_size // ranks, mixer.groups_ssm_state_size // ranks
            if layer.module is mixer.conv1d:
                return (inner, state, state), (heads, groups, groups)
            if layer.module is mixer.in_proj:
                return (inner, inner, state, state, heads), (heads, heads, groups, groups, heads)
        elif isinstance(mixer, QwenGatedDeltaNetAttention) and layer.module is mixer.conv1d:
            ranks = mixer.tp_size
            key, value = mixer.key_dim // ranks, mixer.value_dim // ranks
            key_heads, value_heads = mixer.num_k_heads // ranks, mixer.num_v_heads // ranks
            return (key, key, value), (key_heads, key_heads, value_heads)
    return None
