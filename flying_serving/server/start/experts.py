"""The kernel of routed experts on a GPU: lanes have slices of lane 1's where it takes strides."""

from typing import Any

from vllm.platforms import current_platform

from flying_serving.config import FlyingConfig
from flying_serving.log import logger
from flying_serving.vllm_adapter.weights.expert_kernels import KERNEL

_QUANTIZATIONS = (None, "fp8")
"""Values of vLLM's `quantization` whose experts always have this kernel."""


def choose_expert_kernel(config: Any, flying: FlyingConfig) -> None:
    """Let vLLM take its Triton kernel for routed experts, and log that, where groups may be formed
    and --moe-backend leaves the kernel open.

    Without it, experts are cut into units, each with a launch of its own, or cannot be shared. Lent
    experts are cut into units by any kernel.
    """
    kernels, model = config.kernel_config, config.model_config
    forms_groups = config.parallel_config.data_parallel_size > 1 and flying.group_sizes != (1,)
    has_slices = forms_groups and not flying.lend_weights and not current_platform.is_cpu()
    is_open = kernels.moe_backend == "auto" and model.quantization in _QUANTIZATIONS
    if model.is_moe and has_slices and is_open:
        logger.info("--moe-backend=%s: set, as lanes share slices of its experts", KERNEL)
        kernels.moe_backend = KERNEL
