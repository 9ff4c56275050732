"""vLLM's placement of CPU workers, which is left to ours, and its library for NUMA nodes."""

import ctypes
import os
import sys
from collections.abc import Iterable
from mmap import mmap
from typing import Any

from vllm.utils.numa_utils import get_libnuma

from flying_serving.log import logger
from flying_serving.placement.wishes import BIND, NOBIND, SIMULATED

_MPOL_INTERLEAVE = 3
_MASK_BYTES = 128
"""The size of a mask for the 1024 nodes that Linux can have."""


def leave_placement_to_workers() -> None:
    """Keep vLLM's executor from placing workers, which it does by variables that OpenMP reads when
    a program begins.

    Our workers are forked, and place themselves (see `worker/placed.py`).
    """
    os.environ[BIND] = NOBIND
    os.environ.pop(SIMULATED, None)


def let_devices_share_nodes(parallel: Any) -> None:
    """Give each device of all engines of a ParallelConfig a number by its place.

    Without numbers vLLM counts devices in the variable that says which memory nodes it may use, and
    ends if there are fewer nodes than devices. On the CPU the numbers have no other use.
    """
    if parallel.assigned_physical_gpu_ids is None:
        parallel.assigned_physical_gpu_ids = list(
            range(parallel.data_parallel_size * parallel.tensor_parallel_size)
        )


def interleave(memory: mmap, nodes: Iterable[int]) -> None:
    """Spread the pages of shared memory that do not exist yet over NUMA nodes in turn.

    Without this, a page is on the node of the process that first touches it.
    """
    library = get_libnuma()
    if library is None or library.numa_available() < 0:
        return
    mask = sum(1 << node for node in nodes).to_bytes(_MASK_BYTES, sys.byteorder)
    begin = (ctypes.c_char * len(memory)).from_buffer(memory)
    size_bytes, bits = ctypes.c_ulong(len(memory)), ctypes.c_ulong(8 * _MASK_BYTES)
    if library.mbind(begin, size_bytes, _MPOL_INTERLEAVE, mask, bits, 0):
        logger.warning("memory of a group is not spread over its NUMA nodes: the system refuses it")
