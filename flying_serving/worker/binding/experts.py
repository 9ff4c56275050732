"""Routed experts, cut into units that each look like a rank of the widest lane."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.memory.units import RawUnits, WeightPages
from flying_serving.worker.binding.cuts import expert_width
from flying_serving.worker.binding.methods import ExpertParts
from flying_serving.worker.binding.plain import own_tensors

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
EXPERT_BIASES = {"w13_bias", "w2_bias"}


@dataclass(frozen=True)
class SharedExperts:
    """All experts of a layer. Each unit is a method of vLLM's with its layer.

    `raw`: the weights as that method reads them. vLLM's kernels for the CPU have a format of their
    own, in plain memory. So pages of a unit can be dropped, and written back as they were.
    """

    units: list[tuple[Any, Module]]
    raw: RawUnits

    @classmethod
    def of(cls, units: list[tuple[Any, Module]], pages: WeightPages | None) -> "SharedExperts":
        """Make the experts of a layer from its units. `pages`: the memory they lie in; None: they
        are never dropped.
        """
        weights = {
            (0, n): [getattr(layer, key).data for key in EXPERT_WEIGHTS]
            for n, (_, layer) in enumerate(units)
        }
        return cls(units, RawUnits([_segment(units)], weights, pages))

    def part(self, rank: int, degree: int) -> ExpertParts:
        """Return the method for the experts in the lane of `rank` of `degree`."""
        chosen = [self.units[u] for u in _segment(self.units).units_of(rank, degree)]
        return ExpertParts(chosen, self.raw.guard(rank, degree))


def _segment(units: Sequence[Any]) -> Segment:
    return Segment(len(units), len(units))


def refuse_experts(name: str, layer: Any) -> None:
    """Raise WeightError for experts that cannot be cut into units."""
    if not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        raise WeightError(f"{name}: quantized experts cannot be shared between lanes")
    if own_tensors(layer).keys() & EXPERT_BIASES:
        raise WeightError(f"{name}: experts with biases cannot be shared between lanes yet")


def _refuse_monolithic(name: str, method: Any) -> None:
    """Raise WeightError for a kernel that routes and multiplies in one call: `ExpertParts` gives
    each unit the routing.
    """
    if method.is_monolithic:
        raise WeightError(
            f"{name}: the kernel {method.unquantized_backend.value} routes tokens itself (it is "
            "monolithic), so lanes cannot share its experts; choose another with --moe-backend, "
            "for example triton"
        )


def expert_unit(name: str, full: Any, shell: Any, unit: int, units: int) -> tuple[Any, Module]:
    """Return one unit of all experts of a layer, in the runtime format of vLLM's own method."""
    experts, fused, hidden = full.w13_weight.shape
    width = expert_width(name, full, units)
    if shell.w13_weight.shape[1] != 2 * width:
        raise WeightError(
            f"{name}.w13_weight: {fused // 2} rows do not make {units} units of whole kernel blocks"
        )
    layer = copy.copy(shell)
    layer._parameters = dict(shell._parameters)
    layer._modules = {k: m for k, m in shell._modules.items() if k != "quant_method"}
    rows = slice(unit * width, (unit + 1) * width)
    w13 = full.w13_weight.data.view(experts, 2, fused // 2, hidden)[:, :, rows].reshape(
        experts, 2 * width, hidden
    )
    layer.w13_weight = Parameter(w13.contiguous(), requires_grad=False)
    layer.w2_weight = Parameter(full.w2_weight.data[:, :, rows].contiguous(), requires_grad=False)
    method = layer.__dict__["quant_method"] = UnquantizedFusedMoEMethod(layer.moe_config)
    _refuse_monolithic(name, method)
    method.process_weights_after_loading(layer)
    return method, layer


def install_experts(
    model: Module, experts: dict[str, SharedExperts], rank: int, degree: int
) -> None:
    """Let the experts of a lane's model sum over the units of `rank` of `degree`."""
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            part = experts[name].part(rank, degree)
            layer._modules.pop("quant_method", None)
            layer.__dict__["quant_method"] = part
            for key in EXPERT_WEIGHTS:
                layer._parameters[key] = part.first_layer._parameters[key]
