"""One torch world over all engines, and the switch of vLLM's tensor-parallel group."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from flying_serving.config import Deployment
from flying_serving.layout.groups import world_rank
from flying_serving.vllm_adapter.assigned import assigned

_START_TIMEOUT_S = 600
_world: ContextVar[tuple[Deployment, int, int] | None] = ContextVar("world", default=None)


def world_of_all_engines(deployment: Deployment, engine: int, device: int) -> AbstractContextManager[None]:
    """While the body runs, vLLM's workers that set up their distributed environment join the common world."""
    return assigned(_world, (deployment, engine, device))


def join_world(
    original: Any,
    vllm_config: Any,
    rank: int,
    distributed_init_method: str | None = None,
    local_rank: int = -1,
    backend: str = "nccl",
) -> None:
    """Wraps `init_worker_distributed_environment`: same signature, the common world in place of the engine's own."""
    world = _world.get()
    if world is None:
        original(vllm_config, rank, distributed_init_method, local_rank, backend)
        return
    deployment, engine, device = world
    parallel_state.set_custom_all_reduce(not vllm_config.parallel_config.disable_custom_all_reduce)
    parallel_state.init_distributed_environment(
        deployment.engines * deployment.devices,
        world_rank(engine, device, deployment.engines),
        f"file://{deployment.run_dir}/world",
        local_rank,
        backend,
        timedelta(seconds=_START_TIMEOUT_S),
    )
    # every rank alone, in every dimension; the lanes' own groups take the tensor-parallel place
    parallel_state.initialize_model_parallel(1)


def make_coordinators(partition: list[list[int]], name: str, local_rank: int) -> Any:
    """The coordinator of this rank's group; all ranks of the world call it together."""
    backend = current_platform.dist_backend
    return parallel_state.init_model_parallel_group(partition, max(local_rank, 0), backend, group_name=name)


def set_home(coordinator: Any) -> None:
    """Make lane 1's group the tensor-parallel group whenever no lane is active."""
    parallel_state._TP = coordinator
    parallel_state._ETP = coordinator


@contextmanager
def activate(coordinator: Any) -> Iterator[None]:
    """Make a group vLLM's tensor-parallel group while the body runs."""
    home = parallel_state._TP
    parallel_state._TP = parallel_state._ETP = coordinator
    try:
        yield
    finally:
        parallel_state._TP = parallel_state._ETP = home
