"""The group that vLLM's layers take for the tensor-parallel group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import parallel_state

from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.patches.table import TENSOR_PARALLEL_GROUPS


def set_home(coordinator: Any) -> None:
    """Make lane 1's group the tensor-parallel group whenever no lane is active."""
    for group in TENSOR_PARALLEL_GROUPS:
        installer.hold(group, coordinator)


@contextmanager
def activate(coordinator: Any) -> Iterator[None]:
    """Make a group vLLM's tensor-parallel group while the body runs, which may be one step."""
    home = parallel_state._TP
    parallel_state._TP = parallel_state._ETP = coordinator
    try:
        yield
    finally:
        parallel_state._TP = parallel_state._ETP = home
