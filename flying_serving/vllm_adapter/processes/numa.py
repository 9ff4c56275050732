"""vLLM's placement of CPU workers, which is left to ours (`worker/placed.py`)."""

import os
from typing import Any

from flying_serving.placement.plan import BIND, NOBIND


def leave_placement_to_workers() -> None:
    """Keep vLLM's executor from placing workers, which it does by variables of OpenMP."""
    os.environ[BIND] = NOBIND
    os.environ.pop("VLLM_CPU_SIM_MULTI_NUMA", None)  # vLLM takes no other value of BIND with it


def let_devices_share_nodes(parallel: Any) -> None:
    """Number the devices of all engines of a ParallelConfig. Without numbers vLLM counts devices in
    CPU_VISIBLE_MEMORY_NODES, and ends if it has fewer nodes. The CPU has no other use for them.
    """
    if parallel.assigned_physical_gpu_ids is None:
        count = parallel.data_parallel_size * parallel.tensor_parallel_size
        parallel.assigned_physical_gpu_ids = list(range(count))
