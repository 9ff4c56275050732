"""vLLM linear methods that multiply with a lane's part of the shared storage."""

from typing import Any

import torch
from torch.nn import Module

from flying_serving.memory.storage import Matmul, sum_of_units


class LinearPart:
    """Stands where a parallel layer has its `quant_method`. The bias is inside the part; of rows, of rank 0's."""

    def __init__(self, part: Matmul) -> None:
        self._part = part

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Columns: (..., in) -> (..., out of this rank). Rows: (..., in of this rank) -> (..., out), to be summed."""
        return self._part(x)


class VocabularyPart:
    """Stands where an embedding or an LM head has its `quant_method`: look-up in a view, logits by the shared part."""

    def __init__(self, logits: Matmul | None) -> None:
        self._logits = logits

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """(tokens) -> (tokens, hidden)."""
        return torch.nn.functional.embedding(input_, layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, vocabulary of this rank)."""
        if self._logits is None:  # nothing in the model says that this embedding is a head as well
            return torch.nn.functional.linear(x, layer.weight, bias)
        out = self._logits(x)
        return out if bias is None else out + bias


class ExpertParts:
    """Stands where routed experts have their `quant_method`: the sum over this rank's units of the experts.

    Everything it is asked that depends on the kind of kernel alone is answered by the first unit's own method.
    """

    def __init__(self, units: list[tuple[Any, Module]]) -> None:
        self._units = units

    def __getattr__(self, name: str) -> Any:
        if name == "_units":  # a copy or what is unpickled has none yet, and is asked how to set its state
            raise AttributeError(name)
        return getattr(self._units[0][0], name)

    def apply(self, layer: Module, x: torch.Tensor, **routing: Any) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden), still to be summed over the ranks."""
        (first, unit), *others = self._units
        rest = routing | {"shared_experts": None}  # they belong to the layer as a whole: once is enough
        parts = [first.apply(layer=unit, x=x, **_routing_of(unit, routing))]
        parts += [method.apply(layer=unit, x=x, **_routing_of(unit, rest)) for method, unit in others]
        return sum_of_units(parts)


def _routing_of(unit: Module, routing: dict[str, Any]) -> dict[str, Any]:
    """What one unit is told: vLLM's CPU kernel writes ones over routing weights that apply to the input."""
    if not unit.apply_router_weight_on_input:
        return routing
    return routing | {"topk_weights": routing["topk_weights"].clone()}
