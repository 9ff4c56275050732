"""Experts in MXFP4 in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.platforms import current_platform

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NUMBERS = torch.cat([MAGNITUDES, -MAGNITUDES])
SCALE_BIAS = 127
ALPHA, LIMIT = 1.702, 7.0
"""Of the activation of gpt-oss."""


def numbers_of(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of (..., inputs / 2) bytes, the first of two in the lower half of a byte,
    and (..., inputs / 32) scales: (..., inputs) in float32.
    """
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    blocks = NUMBERS[codes].unflatten(-1, (scales.shape[-1], -1))
    return torch.ldexp(blocks, scales.to(torch.int32).unsqueeze(-1) - SCALE_BIAS).flatten(-2)


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return what gpt-oss makes of (tokens, 2 * d), where gate and up alternate: (tokens, d)."""
    gate, up = gate_up[:, 0::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


class Mxfp4InTorch(cpu_moe.CPUExpertsMxfp4):  # type: ignore[misc]
    """vLLM's experts for the CPU, with another kernel."""

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write the sum over each token's experts into (tokens, hidden)."""
        assert activation is MoEActivation.SWIGLUOAI
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            x = hidden_states[tokens].float()
            gate_up = x @ numbers_of(w1[expert], self.w1_scale[expert]).t() + self.w1_bias[expert]
            down = numbers_of(w2[expert], self.w2_scale[expert])
            parts = activate(gate_up) @ down.t() + self.w2_bias[expert]
            total.index_add_(0, tokens, parts * topk_weights[tokens, places].float().unsqueeze(1))
        output.copy_(total)


def register(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM take this kernel for experts in MXFP4, which then stay as they are loaded."""
    types = [torch.bfloat16, torch.float32]
    replace(cpu_moe, "CPUExpertsMxfp4", Mxfp4InTorch)
    replace(cpu_moe, "prepare_mxfp4_moe_layer_for_cpu", lambda *tensors: tensors)
    replace(Mxfp4Config, "get_supported_act_dtypes", staticmethod(lambda: types))
