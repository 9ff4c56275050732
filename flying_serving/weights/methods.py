"""vLLM linear methods that multiply with a lane's part of the shared storage."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase

from flying_serving.vllm_adapter.model_runner.compiled import HiddenProduct
from flying_serving.weights.storage import Matmul, sum_of_units


class LinearPart:
    """The `quant_method` of a parallel layer in a lane. The part includes the bias; of a
    row-parallel layer, only rank 0's part does.
    """

    def __init__(self, part: Matmul) -> None:
        self._part = part

    def apply(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply. Columns: (..., in) -> (..., out of this rank). Rows: (..., in of this rank) ->
        (..., out), to be summed.
        """
        return self._part(x)


def hide_products(model: Module, layers: dict[str, Any]) -> None:
    """Make each product of lane 1's model one operation for torch.compile.

    A product with packed units is a call of a library for each of them. torch.compile would make
    the number of tokens a constant there. `layers`: those of lane 1's forward context, which gets
    the products.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and isinstance(layer.quant_method, LinearPart):
            width = (
                layer.output_size_per_partition
                if isinstance(layer, ColumnParallelLinear)
                else layer.output_size
            )
            assert name not in layers, f"{name}: vLLM's forward context has another layer"
            layers[name] = layer.quant_method = HiddenProduct(layer.quant_method, name, width)


class VocabularyPart:
    """The `quant_method` of an embedding or an LM head in a lane: look-up in a view, logits by the
    shared part.

    `check`: called before the view is read, raises IntegrityError while rows of it are dropped.
    """

    def __init__(self, logits: Matmul | None, check: Callable[[], None]) -> None:
        self._logits = logits
        self._check = check

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Look up tokens: (tokens) -> (tokens, hidden)."""
        self._check()
        return torch.nn.functional.embedding(input_, layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits: (tokens, hidden) -> (tokens, vocabulary of this rank)."""
        if self._logits is None:  # nothing in the model says that this embedding is a head as well
            self._check()
            return torch.nn.functional.linear(x, layer.weight, bias)
        out = self._logits(x)
        return out if bias is None else out + bias


class ExpertParts:
    """The `quant_method` of routed experts in a lane: the sum over this rank's units of the
    experts.

    The first unit's own method answers all questions that depend on the kind of kernel alone.
    `check`: called before the units are read, raises IntegrityError while one of them is dropped.
    """

    def __init__(self, units: list[tuple[Any, Module]], check: Callable[[], None]) -> None:
        self._units = units
        self._check = check

    @property
    def first_layer(self) -> Module:
        """The layer of the first unit."""
        return self._units[0][1]

    def __getattr__(self, name: str) -> Any:
        # a copy or an unpickled object has none yet, and is asked how to set its state
        if name == "_units":
            raise AttributeError(name)
        return getattr(self._units[0][0], name)

    def apply(self, layer: Module, x: torch.Tensor, **routing: Any) -> torch.Tensor:
        """Run the experts: (tokens, hidden) -> (tokens, hidden), still to be summed over the
        ranks.
        """
        self._check()
        (first, unit), *others = self._units
        # they belong to the layer as a whole: once is enough
        rest = routing | {"shared_experts": None}
        parts = [first.apply(layer=unit, x=x, **_routing_of(unit, routing))]
        parts += [
            method.apply(layer=unit, x=x, **_routing_of(unit, rest)) for method, unit in others
        ]
        return sum_of_units(parts)


def _routing_of(unit: Module, routing: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for one unit. vLLM's CPU kernel writes ones over routing weights that
    apply to the input.
    """
    if not unit.apply_router_weight_on_input:
        return routing
    return routing | {"topk_weights": routing["topk_weights"].clone()}
