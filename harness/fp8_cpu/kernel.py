"""Products of FP8 numbers in plain torch, in place of those of CUTLASS, FlashInfer, DeepGEMM and
Triton.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm, flashinfer, triton
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import PlatformEnum

BLOCK = 128
"""Outputs and inputs of a block with one scale."""
ALIGNED = 16
"""Bytes at multiples of which tensors and their rows begin."""
LARGEST, SMALLEST = 448.0, 1e-12
NUMBERS = torch.float8_e4m3fn


def round_numbers(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest numbers of FP8."""
    return x.clamp(-LARGEST, LARGEST).to(NUMBERS)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to FP8 with one scale; return it too. As vLLM's `scaled_fp8_quant`."""
    return round_numbers(x.float() * scale.reciprocal()), scale


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of (tokens, in) and (in, out), with any strides.

    Scales are of tokens and of outputs, or one for all. Or they are (tokens, in / 128) and
    (in / 128, out / 128).
    """
    left, right = a.float(), b.float().contiguous()
    if scale_b.numel() in (1, b.shape[1]) and scale_a.numel() in (1, a.shape[0]):
        product = left @ right * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    else:
        inputs, outputs = b.shape
        by_row = scale_b.repeat_interleave(BLOCK, 0)[:inputs]
        right = right * by_row.repeat_interleave(BLOCK, 1)[:, :outputs]
        product = left * scale_a.repeat_interleave(BLOCK, 1)[:, :inputs] @ right
    return (product if bias is None else product + bias.float()).to(out_dtype)


def multiply_packed(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As CUTLASS's products: each column of `b` follows the one before it, and nothing is padded.

    Raises:
        ValueError: where these would read other numbers, or refuse.
    """
    if b.stride() != (1, b.shape[0]):
        raise ValueError(f"columns of {b.shape[0]} numbers that are {b.stride()} apart")
    if b.shape[0] % ALIGNED or b.shape[1] % ALIGNED or b.data_ptr() % ALIGNED:
        raise ValueError(f"a weight {tuple(b.shape)} that is not aligned")
    if not scale_b.t().is_contiguous():
        raise ValueError("scales that are apart")
    return multiply(a, b, scale_a, scale_b, out_dtype, bias)


def multiply_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    block: list[int],
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As Triton's product with a weight (out, in), for blocks of 128."""
    assert block == [BLOCK, BLOCK]
    return multiply(a, b.t(), scale_a, scale_b.t(), out_dtype)


def multiply_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    **_: Any,
) -> None:
    """As DeepGEMM's product: a weight (out, in) with any stride of its rows, scales in one piece.
    Raises ValueError otherwise.
    """
    weight, scales = b
    if weight.stride(1) != 1 or weight.stride(0) % ALIGNED or weight.data_ptr() % ALIGNED:
        raise ValueError(f"rows of a weight that are {weight.stride()} apart")
    if not scales.is_contiguous():
        raise ValueError("scales that are apart")
    out.copy_(multiply(a[0], weight.t(), a[1], scales.t(), out.dtype))


def multiply_bfloat16(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """As FlashInfer's product, which rounds each 128 inputs of a token by itself."""
    if not weight_scale.is_contiguous():
        raise ValueError("scales that are apart")
    groups = input.float().unflatten(1, (-1, BLOCK))
    scales = (groups.abs().amax(-1) / LARGEST).clamp(min=SMALLEST)
    numbers = round_numbers(groups / scales.unsqueeze(-1))
    return multiply_packed(numbers.flatten(1), weight.t(), scales, weight_scale.t(), out_dtype)


def activate(x: torch.Tensor, layer: Any) -> QuantizedActivation:
    """As vLLM's activation that rounds the inputs of the next layer, whose scale is known."""
    out = SiluAndMul.forward_native(x)
    numbers, scale = quantize(out, layer.input_scale)
    return QuantizedActivation(numbers, scale, x.dtype, out.shape, kFp8StaticTensorSym)


def register(
    replace: Callable[[object, str, object], None] = setattr,
    blocks: type = linear.CutlassFp8BlockScaledMMKernel,
) -> None:
    """Let vLLM choose as on a GPU of compute capability 9.0.

    `replace`: sets an attribute of an object. `blocks`: the kernel for blocks with one scale.
    """
    able = staticmethod(lambda *_: (True, None))
    whole = linear.CutlassFP8ScaledMMLinearKernel
    for kernel in (whole, blocks):
        replace(kernel, "is_supported", able)
        replace(kernel, "can_implement", able)
    replace(linear, "_POSSIBLE_FP8_KERNELS", {PlatformEnum.CPU: [whole]})
    replace(linear, "_POSSIBLE_FP8_BLOCK_KERNELS", {PlatformEnum.CPU: [blocks]})
    types = [torch.bfloat16, torch.float16, torch.float32]
    replace(fp8.Fp8Config, "get_supported_act_dtypes", staticmethod(lambda: types))
    replace(fp8, "cutlass_fp8_supported", lambda: True)
    replace(_custom_ops, "scaled_fp8_quant", quantize)
    replace(_custom_ops, "cutlass_scaled_mm", multiply_packed)
    replace(triton, "triton_scaled_mm", multiply)
    replace(fp8_utils, "w8a8_triton_block_scaled_mm", multiply_blocks)
    replace(deep_gemm, "fp8_gemm_nt", multiply_nt)
    replace(flashinfer, "flashinfer_fp8_blockscale_gemm", multiply_bfloat16)
    fused = {(SiluAndMul, kFp8StaticTensorSym): activate}
    replace(fused_act_quant, "_FUSED_ACT_QUANT", fused)
