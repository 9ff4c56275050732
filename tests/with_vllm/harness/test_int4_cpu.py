"""The product with int4 weights in float32 is that of vLLM's kernel, but for its rounding."""

import pytest
import torch
from vllm import _custom_ops as ops

from flying_lab.tiny_models.quantized import GROUP, int4_groups, int4_zero_points, pack_int4
from harness.int4_cpu import BLOCK, multiply, weight_of

OUTPUTS, INPUTS, TOKENS = 64, 2 * GROUP, 3
INSTRUCTIONS = "vec"


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers (outputs, inputs) as vLLM's kernel has them."""
    rows = pack_int4(numbers.t().contiguous(), 1)
    return rows.view(INPUTS, -1, BLOCK // 8).permute(1, 0, 2).reshape(OUTPUTS // BLOCK, -1)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_weight_is_what_was_rounded(has_zeros: bool) -> None:
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    if has_zeros:
        numbers, scales, points = int4_zero_points(weight)
        zeros = pack_int4(points.t().contiguous(), 1)
    else:
        (numbers, scales), zeros = int4_groups(weight), None
    found = weight_of(packed(numbers), scales.t().contiguous(), zeros).t()
    assert ((found - weight).abs() <= 0.51 * scales.repeat_interleave(GROUP, 1)).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_that_of_the_kernel_of_vllm(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    x = torch.randn(TOKENS, INPUTS, generator=generator).bfloat16()
    bias = torch.randn(OUTPUTS, generator=generator).bfloat16() if has_bias else None
    numbers, scales = int4_groups(weight)
    tensors = packed(numbers), scales.t().contiguous().bfloat16(), None, bias
    theirs = ops.cpu_gemm_wna16(x, *tensors, 8, INSTRUCTIONS).float()
    ours = multiply(x, *tensors, 8, INSTRUCTIONS).float()
    assert (ours - theirs).norm() < 0.01 * theirs.norm()
