"""Products with int4 weights in float32, so that lanes with them are tested exactly.

vLLM's kernel for the CPU computes in bfloat16 or float16, where degrees differ by rounding and a
stream may part from its reference at a near-tie. This one takes the same packed tensors, in plain
torch. In float32 degrees differ by rounding errors alone.
"""

from collections.abc import Callable

import torch
from vllm import _custom_ops

PREAMBLE = "from harness.int4_cpu import register; register()"
"""Code for a forked server."""
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
BLOCK = 16
"""Outputs whose numbers lie together."""
MIDDLE = 8
"""What stands for zero where a weight has no zero points."""


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers (..., 8 * n), of 0 to 15, of (..., n) in int32, the lowest bits first."""
    return ((packed.unsqueeze(-1) >> SHIFTS) & 15).flatten(-2)


def weight_of(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> torch.Tensor:
    """Return the weight (inputs, outputs) in float32.

    Args:
        packed: (outputs / 16, inputs * 2) in int32, as vLLM's kernel has it: for each block of
            outputs, and each input in turn.
        scales: (groups of inputs, outputs).
        zeros: (groups of inputs, outputs / 8) in int32, or None.
    """
    blocks = unpack(packed).unflatten(-1, (-1, BLOCK))  # (blocks, inputs, outputs of a block)
    numbers = blocks.transpose(0, 1).flatten(1).float()
    groups = numbers.unflatten(0, (scales.shape[0], -1))
    middle = torch.tensor(float(MIDDLE)) if zeros is None else unpack(zeros).unsqueeze(1).float()
    return ((groups - middle) * scales.float().unsqueeze(1)).flatten(0, 1)


def multiply(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """As vLLM's `cpu_gemm_wna16`: (..., inputs) to (..., outputs), in the type of the input."""
    product = input.float() @ weight_of(q_weight, scales, zeros)
    return (product if bias is None else product + bias.float()).to(input.dtype)


def register(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM's method for int4 weights on the CPU take this product."""
    replace(_custom_ops, "cpu_gemm_wna16", multiply)
