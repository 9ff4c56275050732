"""What vLLM's Triton experts launch, in plain torch."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import modular_kernel, utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from harness.mxfp4_cpu.kernel import activate as activate_alternating

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
LEAST = 1e-10
"""The smallest scale: of numbers that are all 0."""
TYPES = SimpleNamespace(bfloat16="bfloat16", float16="float16", float32="float32")
"""Stands for Triton's language, whose types are only handed on."""


MatrixOf = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]


def matrix_of(weights: torch.Tensor, scales: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Return the weights (out, in) of an expert, times their scales."""
    return scaled(weights[expert], None if scales is None else scales[expert])


class KeptMatrices:
    """The same, each made once: for servers, whose weights never change."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self, weights: torch.Tensor, scales: torch.Tensor | None, expert: int
    ) -> torch.Tensor:
        key = (weights.data_ptr(), weights.shape, weights.stride(), expert)
        if key not in self._made:
            # with the weights, so that their memory is never that of others
            self._made[key] = weights, matrix_of(weights, scales, expert)
        return self._made[key][1]


def multiply(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    input_scales: torch.Tensor | None,
    scales: torch.Tensor | None,
    routing: torch.Tensor | None,
    _sorted: Any,
    experts: torch.Tensor,
    _padded: Any,
    is_weighted: bool,
    rows_of_input: int,
    *_: Any,
    B_bias: torch.Tensor | None = None,
    matrix_of: MatrixOf = matrix_of,
    **__: Any,
) -> None:
    """Write each row's product with its expert: inputs (rows / rows_of_input, in), weights
    (experts, out, in), out (tokens, chosen, out).

    `experts`: of each row. `routing`: the weights of rows, if `is_weighted`. `matrix_of`: returns
    the weights of an expert.
    """
    rows_out = out.view(-1, out.shape[-1])
    for expert in experts.unique().tolist():
        rows = (experts == expert).nonzero().flatten()
        some = rows // rows_of_input
        x = scaled(inputs[some], _of_rows(input_scales, some))
        product = x @ matrix_of(weights, scales, expert).t()
        if B_bias is not None:
            product += B_bias[expert]
        if is_weighted:
            assert routing is not None
            product *= routing.reshape(-1)[rows].unsqueeze(1)
        rows_out[rows] = product.to(out.dtype)


def _of_rows(scales: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the scales of some rows; one scale is that of all."""
    return scales if scales is None or scales.numel() == 1 else scales[rows]


def scaled(numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return numbers (rows, columns) times their scales: one of all, of each row, or of each
    block. Sums of float64 are the same in any order, once they are rounded to float32.
    """
    whole = numbers.double()
    if scales is None:
        return whole
    if scales.dim() < 2:
        return whole * scales
    rows, columns = whole.shape
    per_row, per_column = -(-rows // scales.shape[0]), -(-columns // scales.shape[1])
    wide = scales.repeat_interleave(per_row, 0)[:rows]
    return whole * wide.repeat_interleave(per_column, 1)[:, :columns]


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *_: Any,
    use_per_token_if_dynamic: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round (tokens, columns) to FP8 with a scale that is given, of each token, or of all."""
    if scale is None:
        largest = x.float().abs()
        largest = largest.amax(1, keepdim=True) if use_per_token_if_dynamic else largest.amax()
        scale = (largest / FP8_MAX).clamp(min=LEAST)
        scale = scale if scale.dim() else scale.view(1)
    return _rounded(x.float() / scale), scale


def quantize_groups(x: torch.Tensor, size: int, *_: Any, **__: Any) -> tuple[Any, torch.Tensor]:
    """Round (tokens, columns) to FP8, with a scale for each token and group of columns."""
    groups = x.float().unflatten(-1, (-1, size))
    scales = (groups.abs().amax(-1) / FP8_MAX).clamp(min=LEAST)
    return _rounded(groups / scales.unsqueeze(-1)).flatten(-2), scales


def activate_and_quantize(
    gate_up: torch.Tensor, group_size: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activate (tokens, 2 * d), all columns of the gate first, and round the result as vLLM does
    where these are two kernels.
    """
    active = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(active, gate_up)
    return utils.per_token_group_quant_fp8(active, group_size)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _assign(topk_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[None, torch.Tensor, None]:
    """Return the expert of each row. The Triton kernel gets rows by expert, in blocks."""
    return None, topk_ids.reshape(-1), None


def _activate(
    original: Any, activation: Any, out: torch.Tensor, gate_up: torch.Tensor, **options: Any
) -> Any:
    """Wrap `apply_moe_activation`: vLLM has no operation for a CPU where gate and up alternate."""
    if activation is not MoEActivation.SWIGLUOAI:
        return original(activation, out, gate_up, **options)
    return out.copy_(activate_alternating(gate_up))


Replace = Callable[[object, str, object], None]


def register_operations(replace: Replace = setattr) -> None:
    """Let vLLM take its Triton experts on this CPU, in FP8 too, with the operations around their
    kernel that vLLM has for no CPU. Triton itself is left as it is.
    """
    experts = triton_moe.TritonExperts
    replace(experts, "_supports_current_device", staticmethod(lambda: True))
    replace(experts, "_supports_quant_scheme", staticmethod(lambda *_: True))
    types = [torch.bfloat16, torch.float16, torch.float32]
    replace(Fp8Config, "get_supported_act_dtypes", staticmethod(lambda: types))
    own = modular_kernel.apply_moe_activation
    replace(modular_kernel, "apply_moe_activation", partial(_activate, own))
    replace(ops, "moe_sum", lambda parts, out, *_: torch.sum(parts, 1, out=out))
    replace(ops, "scaled_fp8_quant", quantize)
    replace(ops, "silu_and_mul_per_block_quant", activate_and_quantize)


def register(replace: Replace = setattr) -> None:
    """Let vLLM's Triton experts run on this CPU, in FP8 too, and without Triton."""
    register_operations(replace)
    replace(triton_moe, "tl", TYPES)
    replace(triton_moe, "invoke_fused_moe_triton_kernel", multiply)
    replace(triton_moe, "_prepare_expert_assignment", _assign)
    replace(utils, "per_token_group_quant_fp8", quantize_groups)


def serve() -> None:
    """Let vLLM's Triton experts run in this process, a server's, for the rest of its life."""
    register()
    triton_moe.invoke_fused_moe_triton_kernel = partial(multiply, matrix_of=KeptMatrices())
