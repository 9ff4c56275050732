"""The kernel of routed experts on a GPU: lanes have slices of lane 1's where it takes strides."""

import os
from typing import Any

from vllm.platforms import current_platform

from flying_serving.config import FlyingConfig
from flying_serving.log import logger
from flying_serving.policy.policies import POLICIES
from flying_serving.server.start.support import is_pooling
from flying_serving.vllm_adapter.weights.expert_kernels import KERNEL

_MOST_EXPERTS = 992
"""The kernel's table of experts has less than 1,024, in steps of 32 (vLLM's `TritonExperts`)."""
_OTHER_KERNELS = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")
"""Variables by which a user asks for another kernel. vLLM reads them only if it chooses itself."""


def choose_expert_kernel(config: Any, flying: FlyingConfig) -> None:
    """Let vLLM take its Triton kernel for routed experts, and log that, where groups may be formed
    and the user leaves the kernel open.

    Without it, experts are cut into units, each with a launch of its own, or cannot be shared. Lent
    experts are cut into units by any kernel.
    """
    if _may_share_slices(config, flying) and _is_open(config):
        logger.info("--moe-backend=%s: set, as lanes share slices of its experts", KERNEL)
        config.kernel_config.moe_backend = KERNEL


def _may_share_slices(config: Any, flying: FlyingConfig) -> bool:
    """Return whether a model has routed experts of which lanes of groups may have slices."""
    model, pinned_size = config.model_config, POLICIES[flying.policy].pinned_size
    forms_groups = (
        config.parallel_config.data_parallel_size > 1
        and flying.group_sizes != (1,)
        and pinned_size is not min
        and not is_pooling(model)
    )
    return (
        forms_groups
        and not current_platform.is_cpu()
        and not flying.lend_weights
        and bool(model.is_moe)
    )


def _is_open(config: Any) -> bool:
    """Return whether the kernel can multiply with the experts, and the user has named no other."""
    model = config.model_config
    has_kernel = model.quantization is None or (
        model.quantization == "fp8" and current_platform.supports_fp8()
    )
    return (
        config.kernel_config.moe_backend == "auto"
        and has_kernel
        and model.get_num_experts() <= _MOST_EXPERTS
        and not any(os.environ.get(name) == "1" for name in _OTHER_KERNELS)
    )
