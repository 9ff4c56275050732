"""Gated feed-forward layers whose activation reads the output of the fused layer unit by unit.

The fused layer's product has gate and up of one unit, then those of the next one. An activation
that works on each token by itself takes this without a copy: it sees each unit as a token.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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

ACTIVATIONS = (GeluAndMul, MulAndSilu, SiluAndMul, SiluAndMulWithClamp)
"""Activations of (tokens, 2 * d) to (tokens, d) that pair column i with column d + i."""


@dataclass(frozen=True)
class Gated:
    """A module whose activation is the only reader of its fused layer's output.

    Args:
        name: of the module in the model.
        module: it.
        fused: the name of the fused layer in the module.
        activation: the name of the activation in the module.
    """

    name: str
    module: Module
    fused: str
    activation: str

    @property
    def fused_name(self) -> str:
        """The name of the fused layer in the model."""
        return f"{self.name}.{self.fused}" if self.name else self.fused

    @property
    def layer(self) -> Any:
        """The fused layer."""
        return self.module.get_submodule(self.fused)

    def read_by_unit(self, units: int) -> None:
        """Let the activation read outputs of `units` units."""
        activation = self.module.get_submodule(self.activation)
        setattr(self.module, self.activation, ActivationByUnit(activation, units))


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


def gated_modules(model: Module) -> Iterator[Gated]:
    """Yield each module of a model that is certain to read its fused layer by its activation
    alone.
    """
    owners = Counter(part for module in model.modules() for part in module.children())
    for name, module in list(model.named_modules()):
        parts = dict(module.named_children())
        fused = [key for key, part in parts.items() if _is_pair(part) and owners[part] == 1]
        activations = [key for key, part in parts.items() if type(part) in ACTIVATIONS]
        if len(fused) == len(activations) == 1:
            gated = Gated(name, module, fused[0], activations[0])
            if _reads_by_activation_alone(gated):
                yield gated


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


def _reads_by_activation_alone(gated: Gated) -> bool:
    """Run the module's own `forward` with stand-ins for its children. The fused layer's stand-in
    returns an object that no operation accepts.
    """
    output, x = _Output(), torch.empty(1, 1, device="meta")
    outputs = {gated.fused: output, gated.activation: x}
    children = gated.module.named_children()
    stubs = {key: _Stub(child, outputs.get(key)) for key, child in children}
    trial = copy.copy(gated.module)
    trial.__dict__["_modules"] = stubs
    try:
        result = trial.forward(x)
    except Exception:  # noqa: BLE001 - a model's own code, which did something else with the output
        return False
    reads = [key for key, stub in stubs.items() if any(it is output for it in stub.inputs)]
    return reads == [gated.activation] and isinstance(result, torch.Tensor)
