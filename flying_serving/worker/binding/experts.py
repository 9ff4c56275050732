"""Routed experts, cut into units that each look like a rank of the widest lane."""

import copy
from typing import Any

from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.worker.binding.cuts import expert_width
from flying_serving.worker.binding.methods import ExpertParts


def expert_unit(name: str, full: Any, shell: Any, unit: int, units: int) -> tuple[Any, Module]:
    """One unit of all experts of a layer, in the runtime format of vLLM's own method."""
    experts, fused, hidden = full.w13_weight.shape
    width = expert_width(name, full, units)
    if shell.w13_weight.shape[1] != 2 * width:
        raise WeightError(f"{name}.w13_weight: {fused // 2} rows do not make {units} units of whole kernel blocks")
    layer = copy.copy(shell)
    layer._parameters = dict(shell._parameters)
    layer._modules = {k: m for k, m in shell._modules.items() if k != "quant_method"}
    rows = slice(unit * width, (unit + 1) * width)
    w13 = full.w13_weight.data.view(experts, 2, fused // 2, hidden)[:, :, rows].reshape(experts, 2 * width, hidden)
    layer.w13_weight = Parameter(w13.contiguous(), requires_grad=False)
    layer.w2_weight = Parameter(full.w2_weight.data[:, :, rows].contiguous(), requires_grad=False)
    method = layer.__dict__["quant_method"] = UnquantizedFusedMoEMethod(layer.moe_config)
    method.process_weights_after_loading(layer)
    return method, layer


def install_experts(model: Module, experts: dict[str, list[tuple[Any, Module]]], rank: int, degree: int) -> None:
    """Let the experts of a lane's model sum over the units of `rank` of `degree`."""
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            units = experts[name]
            chosen = Segment(len(units), len(units)).units_of(rank, degree)
            layer._modules.pop("quant_method", None)
            layer.__dict__["quant_method"] = ExpertParts([units[u] for u in chosen])
            for key in ("w13_weight", "w2_weight"):
                layer._parameters[key] = units[chosen[0]][1]._parameters[key]
