"""Routed experts in lanes: whole, where their kernel takes slices (`whole_experts.py`). Otherwise
they are cut into units that each look like a rank of the widest lane.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.expert_kernels import KERNEL, takes_strides
from flying_serving.weights.expert_forms import (
    ExpertForm,
    expert_tensors,
    expert_weights,
    form_of,
    is_ready,
    unit_tensor,
)
from flying_serving.weights.methods import ExpertParts
from flying_serving.weights.plain import Whole, reachable, storages
from flying_serving.weights.rule import Layer
from flying_serving.weights.store import Store, release
from flying_serving.weights.units import RawUnits, WeightPages
from flying_serving.weights.whole_experts import WholeExperts


class Experts(Whole):
    """All experts of a layer, and what routes to them, which is not cut."""

    of = RoutedExperts
    _shared: "ExpertsInUnits | WholeExperts | None" = None

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        """See `Rule`. The segment is of each expert's columns."""
        columns = form_of(layer.name, layer.module).columns(layer.name, layer.module, engines)
        return (Segment(columns * engines, engines),)

    @classmethod
    def end_loading(cls, layer: Layer) -> None:
        """Keep one expert, and one row or column where no rank cuts: units are copies."""
        for key, tensor in expert_tensors(layer.module).items():
            few = tensor[:1]
            if tensor.dim() > 1 and key.startswith("w2_"):
                few = few[:, :1]
            elif tensor.dim() > 2:
                few = few[:, :, :1]
            layer.module.register_parameter(key, Parameter(few, requires_grad=False))

    def complete(self, shells: Mapping[str, Module], store: Store) -> None:
        """See `Rule`. A unit looks like a rank of the widest lane. Without groups, experts that
        vLLM has made ready stay as they are.
        """
        if store.widest == 1 and is_ready(self.full):
            return
        shell = shells[self.name]
        self._shared = self._taken(shell, store)
        self._shared.install(self.full, 0, 1)
        # units are copies of the shell, which has tensors of its own
        own = storages(shell)
        found = [tensor for _, tensor, _ in reachable(self._shared)]
        self.made = [it for it in found if it.untyped_storage().data_ptr() not in own]

    def _taken(self, shell: Any, store: Store) -> "ExpertsInUnits | WholeExperts":
        """Take a layer's experts: whole, if their kernel takes slices of them and none may be lent.

        A page may have rows of several units of an expert, so of whole ones hardly any page can be
        dropped.
        """
        name, full, form = self.name, self.full, form_of(self.name, self.full)
        if form.method is None and store.lends:
            raise WeightError(f"{name}: quantized experts cannot be lent (--lend-weights)")
        self.input_rounding = form.input_rounding
        if not store.lends and takes_strides(full.quant_method):
            return WholeExperts(name, full, store.widest)
        units = expert_units(name, full, shell, store.widest)
        store.droppable.place_units([unit for _, unit in units])
        experts = ExpertsInUnits.of(units, store.droppable.pages)
        store.droppable.add(name, experts.raw)
        for key in expert_tensors(full):
            release(full, key)
        return experts

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        self.bound = tuple(expert_tensors(layer.module))
        super().bind(layer, rank, degree)
        if self._shared is not None and degree > 1:
            self._shared.install(layer.module, rank, degree)


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

    def install(self, layer: Any, rank: int, degree: int) -> None:
        """Let a layer of a lane sum over the units of `rank` of `degree`."""
        chosen = [self.units[u] for u in _segment(self.units).units_of(rank, degree)]
        part = ExpertParts(chosen, self.raw.guard(rank, degree))
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
