"""vLLM's kernels for FP8 on CUDA, for a part of a layer's outputs or inputs.

CUTLASS's and FlashInfer's products are given the address of a weight and no stride. They read its
rows as if one followed the other (`cutlass_gemm_caller` in vLLM's csrc, `runGemm` in FlashInfer's
fp8_blockscale_gemm_sm90_binding.cu). Some outputs are such rows. Of some inputs each row ends
before the next one begins: the product would be wrong, without an error. Triton's and DeepGEMM's
products are given the stride. They read the same tensors.
"""

import copy
from typing import Any

from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    CutlassFP8ScaledMMLinearKernel,
    DeepGemmFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
    TritonFP8ScaledMMLinearKernel,
)
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT


class StridedFp8(CutlassFP8ScaledMMLinearKernel):
    """CUTLASS's kernel for a scale of each weight or output, with Triton's product."""

    apply_scaled_mm = TritonFP8ScaledMMLinearKernel.apply_scaled_mm


class StridedFp8Blocks(CutlassFp8BlockScaledMMKernel):
    """CUTLASS's kernel for scales of blocks, with Triton's product."""

    apply_block_scaled_mm = TritonFp8BlockScaledMMKernel.apply_block_scaled_mm


def strided(kernel: Any) -> Any:
    """Return a kernel of CUTLASS with a product that takes views of inputs. It rounds inputs as
    before, and takes those that an activation has rounded.
    """
    other = copy.copy(kernel)
    blocks = isinstance(kernel, CutlassFp8BlockScaledMMKernel)
    other.__class__ = StridedFp8Blocks if blocks else StridedFp8
    return other


def deep_gemm_of(kernel: Any) -> Any:
    """Return the kernel that vLLM's FlashInferFp8DeepGEMMDynamicBlockScaledKernel takes for 32
    tokens and more.
    """
    return kernel.fallback


def with_outputs(kernel: Any, outputs: int) -> Any:
    """Return a kernel for a part with so many outputs. CUTLASS's pads outputs to a multiple of 16
    and cuts them off again, so it knows how many its layer has.
    """
    if not hasattr(kernel, "logical_output_size"):
        return kernel
    other = copy.copy(kernel)
    other.logical_output_size = outputs
    return other


def packs_scales(kernel: Any) -> bool:
    """Return whether DeepGEMM packs four scales of a weight into one number, as on Blackwell."""
    deep_gemm = isinstance(getattr(kernel, "fallback", kernel), DeepGemmFp8BlockScaledMMKernel)
    return deep_gemm and DeepGemmQuantScaleFMT.from_oracle() is DeepGemmQuantScaleFMT.UE8M0
