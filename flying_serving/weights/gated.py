"""Gated feed-forward layers whose activation reads the output of the fused layer unit by unit.

The fused layer's product has gate and up of one unit, then those of the next one. An activation
that works on each token by itself takes this without a copy: it sees each unit as a token.
"""

import copy
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.activation import (
    GeluAndMul,
    MulAndSilu,
    SiluAndMul,
    SiluAndMulWithClamp,
)
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear

from flying_serving.weights.rule import Layer

ACTIVATIONS = (GeluAndMul, MulAndSilu, SiluAndMul, SiluAndMulWithClamp)
"""Activations of (tokens, 2 * d) to (tokens, d) that pair column i with column d + i."""


class ActivationByUnit(Module):
    """An activation that sees each unit of a token as a token of its own."""

    def __init__(self, activation: Module, units: int) -> None:
        super().__init__()
        self.activation = activation
        self.units = units

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activate (..., units * 2 * unit size) to (..., units * unit size)."""
        width = x.shape[-1]
        out: torch.Tensor = self.activation(x.reshape(-1, width // self.units))
        return out.view(*x.shape[:-1], width // 2)


def read_by_unit(layer: Layer, units: int) -> bool:
    """Let an activation read the output of a fused layer as that of `units` units. Return False,
    and change nothing, unless it is certain that nothing else reads it.
    """
    if len(layer.owners) != 1:
        return False
    (module,) = layer.owners.values()
    fused = [key for key, part in module.named_children() if _is_pair(part)]
    activations = [key for key, part in module.named_children() if type(part) in ACTIVATIONS]
    if len(fused) != 1 or len(activations) != 1 or getattr(module, fused[0]) is not layer.module:
        return False
    (activation,) = activations
    is_alone = _reads_by_activation_alone(module, fused[0], activation)
    if is_alone:
        setattr(module, activation, ActivationByUnit(getattr(module, activation), units))
    return is_alone


def _is_pair(layer: Module) -> bool:
    return (
        isinstance(layer, MergedColumnParallelLinear)
        and not layer.skip_bias_add
        and len(layer.output_sizes) == 2
        and layer.output_sizes[0] == layer.output_sizes[1]
    )


class _Output:
    """The output of a fused layer, which nothing can be done with but to hand it on."""

    __slots__ = ()


class _Stub(Module):
    """A child of a module that is tried: returns `output`, or what it is given, as a linear layer
    returns it.
    """

    def __init__(self, child: Module, output: Any = None) -> None:
        super().__init__()
        self._output = output
        self._with_bias = isinstance(child, LinearBase) and child.return_bias
        self.inputs: list[Any] = []

    def forward(self, x: Any) -> Any:
        """Keep the input, and return as the child would."""
        self.inputs.append(x)
        output = x if self._output is None else self._output
        return (output, None) if self._with_bias else output


def _reads_by_activation_alone(module: Module, fused: str, activation: str) -> bool:
    """Run the module's own `forward` with stand-ins for its children. The fused layer's stand-in
    returns an object that no operation accepts.
    """
    output, x = _Output(), torch.empty(1, 1, device="meta")
    outputs = {fused: output, activation: x}
    stubs = {key: _Stub(part, outputs.get(key)) for key, part in module.named_children()}
    trial = copy.copy(module)
    trial.__dict__["_modules"] = stubs
    try:
        result = trial.forward(x)
    except Exception:  # noqa: BLE001 - a model's own code, which did something else with the output
        return False
    reads = [key for key, stub in stubs.items() if any(it is output for it in stub.inputs)]
    return reads == [activation] and isinstance(result, torch.Tensor)
