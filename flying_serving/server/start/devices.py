"""The devices of the engines, and how engines exchange tensors, decided before engines start."""

from collections.abc import Callable
from typing import Any

from flying_serving.config import Collectives, FlyingConfig
from flying_serving.errors import ConfigError
from flying_serving.log import logger


def collectives_of(flying: FlyingConfig, *, on_cpu: bool) -> Collectives:
    """Return how the devices of a group exchange tensors.

    Raises:
        ConfigError: if NCCL is to join engines that share a GPU.
    """
    if on_cpu:
        return flying.cpu_collectives
    shared = flying.engines_per_device > 1
    if shared and flying.cuda_collectives in ("nccl", "pynccl"):
        raise ConfigError(
            f"--cuda-collectives={flying.cuda_collectives}: NCCL takes one engine per GPU; "
            f"--engines-per-device={flying.engines_per_device} needs staged"
        )
    return flying.cuda_collectives or ("staged" if shared else "nccl")


def share_devices(
    config: Any, flying: FlyingConfig, physical_id: Callable[[int], int], *, on_cpu: bool
) -> None:
    """Let each GPU be of --engines-per-device engines, one after the other by their numbers.

    `config`: vLLM's VllmConfig, which gets the GPU of each device of each engine. The share of a
    GPU that vLLM may use becomes an engine's. `physical_id` returns the id of the n-th GPU that the
    server sees.

    Raises:
        ConfigError: if the engines cannot be divided so, or KV memory would have to be measured.
    """
    per_device = flying.engines_per_device
    flag = f"--engines-per-device={per_device}"
    parallel, cache = config.parallel_config, config.cache_config
    engines, devices = parallel.data_parallel_size, parallel.tensor_parallel_size
    if engines % per_device:
        raise ConfigError(f"{flag}: must divide {engines}, --data-parallel-size")
    if per_device == 1:
        return
    if on_cpu:
        logger.warning("%s: changes nothing on the CPU, where all engines share the cores", flag)
        return
    if cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"{flag}: needs --kv-cache-memory-bytes, the KV memory of one engine; vLLM cannot "
            "measure the free memory of a GPU on which other engines start"
        )
    given = parallel.assigned_physical_gpu_ids
    gpu_of = physical_id if given is None else given.__getitem__
    needed = engines // per_device * devices
    try:
        gpus = [gpu_of(index) for index in range(needed)]
    except IndexError:
        sizes = f"{engines} engines of {devices} devices"
        raise ConfigError(f"{flag}: {sizes} need {needed} GPUs") from None
    parallel.assigned_physical_gpu_ids = [
        gpus[engine // per_device * devices + device]
        for engine in range(engines)
        for device in range(devices)
    ]
    cache.gpu_memory_utilization /= per_device
    logger.warning(
        "%s: for tests: %d engines share each GPU of %s, each with --gpu-memory-utilization=%g",
        flag,
        per_device,
        gpus,
        cache.gpu_memory_utilization,
    )


def number_devices(parallel: Any) -> None:
    """Number the devices of all engines of a ParallelConfig on the CPU, which has no other use for
    the ids of GPUs.

    Devices may share memory nodes then. Without numbers vLLM counts devices in
    CPU_VISIBLE_MEMORY_NODES, and ends if it has fewer nodes.
    """
    if parallel.assigned_physical_gpu_ids is None:
        count = parallel.data_parallel_size * parallel.tensor_parallel_size
        parallel.assigned_physical_gpu_ids = list(range(count))
