"""vLLM's Triton kernel of routed experts, over slices of weights whose rows lie unit by unit.

The kernel takes the strides of its weights. So experts of any lane can be slices of lane 1's, and
one launch multiplies with all units of a rank. Only what follows the first product sees the units:
gate and up of one, then those of the next one.
"""

from functools import cache
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

KERNEL = "triton"
"""Its value of --moe-backend."""
_EXPERTS = "TritonExperts"


def takes_strides(method: Any) -> bool:
    """Return whether a method of experts multiplies by this kernel."""
    experts = getattr(method, "experts_cls", None)
    return experts is not None and experts.__name__ == _EXPERTS


def kernel_name(method: Any) -> str:
    """Return vLLM's name of the kernel that a method of experts has chosen."""
    for key in ("unquantized_backend", "fp8_backend", "mxfp4_backend"):
        backend = getattr(method, key, None)
        if backend is not None:
            return str(backend.value)
    return type(method).__name__


def set_kernel(method: Any, layer: Module, units: int) -> None:
    """Let a method multiply with the tensors that its layer has now, as they are.

    vLLM's own `process_weights_after_loading` would copy weights that are not contiguous.

    `units`: runs of gate and up in `w13_weight`, each of which is activated by itself.
    """
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    inputs = maybe_make_prepare_finalize(
        method.moe, method.moe_quant_config, allow_new_interface=True
    )
    experts = _by_unit(method.experts_cls)(method.moe, method.moe_quant_config)
    experts.units = units
    method.moe_kernel = FusedMoEKernel(inputs, experts)


@cache
def _by_unit(experts: type[Any]) -> Any:
    """Return a class of vLLM's experts whose activation sees each unit of a token as a token."""

    class ExpertsByUnit(experts):  # type: ignore[misc, valid-type]
        """`units`: of the output of the first product."""

        units = 1

        @property
        def block_shape(self) -> Any:
            """Return the outputs and inputs that have a scale in common.

            vLLM activates and rounds in one kernel where this is the list [128, 128]. That kernel
            reads all columns of the gate first.
            """
            shape = super().block_shape
            return shape if shape is None or self.units == 1 else tuple(shape)

        def activation(
            self, activation: Any, output: torch.Tensor, gate_up: torch.Tensor, **routing: Any
        ) -> None:
            """Activate (tokens, units * 2 * unit size) into (tokens, units * unit size)."""
            by_unit = output.view(-1, output.shape[-1] // self.units)
            gate_up = gate_up.view(-1, gate_up.shape[-1] // self.units)
            super().activation(activation, by_unit, gate_up, **routing)

    return ExpertsByUnit
