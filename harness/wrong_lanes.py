"""Lanes of two devices that are bound wrongly, one way a function: servers that this process starts
have them. Engines are forked from a server, and so have them too.
"""

from collections.abc import Callable
from typing import Any

Change = Callable[[Any, Any, int], None]
"""Changes a model that is bound: it has that of the lane, lane 1's, and the lane's rank."""


def _after_binding(change: Change) -> None:
    from flying_serving.weights.share import SharedWeights

    bind = SharedWeights.bind

    def wrongly(self: Any, model: Any, rank: int, degree: int) -> None:
        bind(self, model, rank, degree)
        if degree == 2:
            change(model, self._model, rank)

    SharedWeights.bind = wrongly  # type: ignore[method-assign]


def halved_norm() -> None:
    """The norm of a layer of Llama has half its weight."""
    from torch.nn import Parameter

    def change(model: Any, _lane1: Any, _rank: int) -> None:
        norm = model.model.layers[1].input_layernorm
        norm.weight = Parameter(norm.weight.detach() * 0.5, requires_grad=False)

    _after_binding(change)


def no_query_norm() -> None:
    """The norm of the queries of a layer of Qwen 3 is zero."""
    import torch
    from torch.nn import Parameter

    def change(model: Any, _lane1: Any, _rank: int) -> None:
        norm = model.model.layers[1].self_attn.q_norm
        norm.weight = Parameter(torch.zeros_like(norm.weight), requires_grad=False)

    _after_binding(change)


def no_query_bias() -> None:
    """The bias of the queries of a layer of Qwen 2 is left out."""
    from torch.nn.functional import pad

    def change(model: Any, lane1: Any, rank: int) -> None:
        layer = model.model.layers[1].self_attn.qkv_proj
        width = layer.output_sizes[0] // 2
        own = slice(rank * width, (rank + 1) * width)
        bias = lane1.model.layers[1].self_attn.qkv_proj.bias.detach()[own]
        method, product = layer.quant_method, layer.quant_method._part
        method._part = lambda x: product(x) - pad(bias, (0, product(x).shape[-1] - width))

    _after_binding(change)


def slopes_of_first_rank() -> None:
    """Both ranks have the slopes (ALiBi) of the first in a layer of Bloom."""

    def change(model: Any, lane1: Any, _rank: int) -> None:
        mine, theirs = (it.transformer.h[1].self_attention.attn.impl for it in (model, lane1))
        mine.alibi_slopes = theirs.alibi_slopes[: len(mine.alibi_slopes)]

    _after_binding(change)


def shifted_columns() -> None:
    """The second rank's products of columns are shifted by one."""
    from flying_serving.weights.storage import PackedColumns, StridedColumns

    def shift(columns: Any) -> None:
        part = columns.part

        def shifted(self: Any, rank: int, degree: int) -> Any:
            product = part(self, rank, degree)
            is_second = (rank, degree) == (1, 2)
            return (lambda x: product(x).roll(1, dims=-1)) if is_second else product

        columns.part = shifted

    for columns in (PackedColumns, StridedColumns):
        shift(columns)


def foreign_tensor() -> None:
    """A layer of every lane holds a tensor that nothing was loaded into."""
    import torch

    from flying_serving.weights import plain

    bind = plain.bind_whole

    def with_one_more(name: str, layer: Any, *others: Any, **options: Any) -> None:
        bind(name, layer, *others, **options)
        if name == "model.layers.1.input_layernorm":
            layer.held = [torch.zeros(3)]

    plain.bind_whole = with_one_more
