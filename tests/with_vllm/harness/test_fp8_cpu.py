"""Products of FP8 numbers in plain torch, and what those of CUDA would read otherwise."""

from collections.abc import Callable

import pytest
import torch

from harness.fp8_cpu.kernel import (
    BLOCK,
    NUMBERS,
    multiply,
    multiply_bfloat16,
    multiply_nt,
    multiply_packed,
    quantize,
)

OUTPUTS, INPUTS, TOKENS = 2 * BLOCK, 3 * BLOCK, 5
ONE = torch.ones(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return (100 * random(*shape, seed=seed)).to(NUMBERS)


X = numbers(TOKENS, INPUTS)
WEIGHT = numbers(OUTPUTS, INPUTS, seed=1).t()
SCALES = random(OUTPUTS // BLOCK, INPUTS // BLOCK, seed=2).abs()
BY_GROUP = random(TOKENS, INPUTS // BLOCK, seed=3).abs()


def test_product_with_scales_of_tokens_and_outputs_is_that_of_torch() -> None:
    """As vLLM's kernel for the CPU computes it."""
    tokens, outputs = random(TOKENS, 1).abs(), random(OUTPUTS, 1, seed=4).abs()
    plain = torch._scaled_mm(X, WEIGHT, scale_a=ONE, scale_b=ONE, out_dtype=torch.float32)
    found = multiply(X, WEIGHT, tokens, outputs, torch.float32)
    torch.testing.assert_close(found, plain * tokens * outputs.t(), rtol=1e-5, atol=1e-3)


def test_product_with_scales_of_blocks_is_the_sum_over_blocks() -> None:
    expected = torch.zeros(TOKENS, OUTPUTS)
    for row in range(SCALES.shape[0]):
        for column in range(SCALES.shape[1]):
            outputs, inputs = (slice(BLOCK * i, BLOCK * (i + 1)) for i in (row, column))
            part = X[:, inputs].float() @ WEIGHT[inputs, outputs].float()
            expected[:, outputs] += part * SCALES[row, column] * BY_GROUP[:, column : column + 1]
    found = multiply(X, WEIGHT, BY_GROUP, SCALES.t(), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-1)


def test_a_view_of_inputs_is_refused_where_no_stride_is_given() -> None:
    """CUTLASS would read other numbers; some outputs are as they were."""
    some = slice(0, BLOCK)
    with pytest.raises(ValueError, match="columns of 128 numbers"):
        multiply_packed(X[:, some], WEIGHT[some], ONE, ONE, torch.float32)
    found = multiply_packed(X, WEIGHT[:, some], ONE, ONE, torch.float32)
    assert torch.equal(found, multiply(X, WEIGHT[:, some], ONE, ONE, torch.float32))


def _of_cutlass(weight: torch.Tensor, scales: torch.Tensor) -> None:
    multiply_packed(X, weight, BY_GROUP, scales.t(), torch.float32)


def _of_deep_gemm(weight: torch.Tensor, scales: torch.Tensor) -> None:
    multiply_nt((X, BY_GROUP), (weight.t(), scales), torch.empty(TOKENS, OUTPUTS))


def _of_flashinfer(weight: torch.Tensor, scales: torch.Tensor) -> None:
    multiply_bfloat16(X.bfloat16(), weight.t(), scales, torch.bfloat16)


@pytest.mark.parametrize("product", [_of_cutlass, _of_deep_gemm, _of_flashinfer])
def test_scales_of_blocks_that_are_apart_are_refused(
    product: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    product(WEIGHT, SCALES)
    wide = torch.cat([SCALES, SCALES], 1)[:, : SCALES.shape[1]]
    with pytest.raises(ValueError, match="scales that are apart"):
        product(WEIGHT, wide)


@pytest.mark.parametrize("product", [_of_cutlass, _of_deep_gemm])
def test_a_weight_that_is_not_aligned_is_refused(
    product: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    storage = torch.empty(OUTPUTS * INPUTS + 1, dtype=torch.uint8)
    weight = storage[1:].view(OUTPUTS, INPUTS).view(NUMBERS).t()
    with pytest.raises(ValueError, match=r"not aligned|rows of a weight"):
        product(weight, SCALES)


def test_rounded_numbers_stay_in_the_range() -> None:
    rounded, scale = quantize(torch.tensor([-9.0, 0.49, 9.0]), torch.tensor(0.01))
    assert rounded.float().tolist() == [-448.0, 48.0, 448.0]
    assert scale.item() == pytest.approx(0.01)
