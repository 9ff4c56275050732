"""Routed experts of all lanes, and their cut into units that each look like a rank of the widest
lane. `whole_experts.py` has those that are not cut.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.expert_kernels import KERNEL
from flying_serving.weights.expert_forms import (
    ExpertForm,
    expert_tensors,
    expert_weights,
    form_of,
    unit_tensor,
)
from flying_serving.weights.methods import ExpertParts
from flying_serving.weights.units import RawUnits, WeightPages


class SharedExperts(Protocol):
    """All experts of a layer, for all lanes."""

    def install(self, layer: Any, rank: int, degree: int) -> None:
        """Let a layer of a lane sum over the units of `rank` of `degree`. Raises WeightError if it
        cannot.
        """


@dataclass(frozen=True)
class ExpertsInUnits:
    """All experts of a layer, in units. Each unit is a method of vLLM's with its layer.

    `raw`: the weights as that method reads them, without biases. vLLM's kernels for the CPU have a
    format of their own, in plain memory. So pages of a unit can be dropped, and written back as
    they were.
    """

    units: list[tuple[Any, Module]]
    raw: RawUnits

    @classmethod
    def of(cls, units: list[tuple[Any, Module]], pages: WeightPages | None) -> "ExpertsInUnits":
        """Make the experts of a layer from its units. `pages`: the memory they lie in; None: they
        are never dropped.
        """
        weights = {
            (0, n): [weight.data for weight in expert_weights(layer)]
            for n, (_, layer) in enumerate(units)
        }
        return cls(units, RawUnits([_segment(units)], weights, pages))

    def part(self, rank: int, degree: int) -> ExpertParts:
        """Return the method for the experts in the lane of `rank` of `degree`."""
        chosen = [self.units[u] for u in _segment(self.units).units_of(rank, degree)]
        return ExpertParts(chosen, self.raw.guard(rank, degree))

    def install(self, layer: Any, rank: int, degree: int) -> None:
        """See `SharedExperts`."""
        part = self.part(rank, degree)
        layer._modules.pop("quant_method", None)
        layer.__dict__["quant_method"] = part
        for key, tensor in expert_tensors(part.first_layer).items():
            layer._parameters[key] = tensor


def _segment(units: Sequence[Any]) -> Segment:
    return Segment(len(units), len(units))


def expert_units(name: str, full: Any, shell: Any, units: int) -> list[tuple[Any, Module]]:
    """Return the units of all experts of a layer, each in the runtime format of vLLM's own method.

    `full`: the layer of lane 1, as loaded. `shell`: that of the widest lane, on the meta device.

    Raises:
        WeightError: naming the layer, if they cannot be cut into units.
    """
    form = form_of(name, full)
    if full.moe_config.w13_num_shards == 1:
        raise WeightError(
            f"{name}: lanes share experts without a gate by vLLM's kernel TRITON alone "
            f"(--moe-backend {KERNEL})"
        )
    width = form.columns(name, full, units)
    room = shell.w13_weight.shape[1] // 2
    if room < width or (room > width and not form.pads):
        raise WeightError(
            f"{name}.w13_weight: {width * units} rows do not make {units} units of whole kernel "
            "blocks"
        )
    return [
        _expert_unit(name, form, full, shell, range(unit * width, (unit + 1) * width))
        for unit in range(units)
    ]


def _expert_unit(
    name: str, form: ExpertForm, full: Any, shell: Any, columns: range
) -> tuple[Any, Module]:
    layer = copy.copy(shell)
    # what is not cut, such as a router's bias, is lane 1's
    layer._parameters = {**shell._parameters, **_shared(shell._parameters, full._parameters)}
    layer._buffers = {**shell._buffers, **_shared(shell._buffers, full._buffers)}
    layer._modules = {k: m for k, m in shell._modules.items() if k != "quant_method"}
    loaded = expert_tensors(full)
    for key, tensor in expert_tensors(shell).items():
        part = unit_tensor(key, loaded[key].data, tensor.shape, columns, full)
        layer._parameters[key] = Parameter(part, requires_grad=False)
    assert form.method is not None, f"{name}: these experts have slices alone"
    method = layer.__dict__["quant_method"] = form.method(shell)
    _refuse_monolithic(name, method, form.backend)
    method.process_weights_after_loading(layer)
    return method, layer


def _shared(shell: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of lane 1's layer that the layer of the widest lane has as well."""
    return {key: full[key] for key in shell if full.get(key) is not None}


def _refuse_monolithic(name: str, method: Any, other: str) -> None:
    """Raise WeightError for a kernel that routes and multiplies in one call: `ExpertParts` gives
    each unit the routing. `other`: a backend that does not.
    """
    if method.is_monolithic:
        kernel = getattr(method, "unquantized_backend", None) or method.mxfp4_backend
        raise WeightError(
            f"{name}: the kernel {kernel.value} routes tokens itself (it is "
            "monolithic), so lanes cannot share its experts; choose another with --moe-backend, "
            f"for example {other}"
        )


def install_experts(
    model: Module, experts: dict[str, SharedExperts], rank: int, degree: int
) -> None:
    """Let the experts of a lane's model sum over the units of `rank` of `degree`. Those that are
    not shared stay as they are.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts) and name in experts:
            experts[name].install(layer, rank, degree)
