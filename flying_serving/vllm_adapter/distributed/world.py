"""The torch world of a worker, and the coordinators of its groups."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from flying_serving.comm.group_files import world_file
from flying_serving.comm.pool import START_TIMEOUT_S
from flying_serving.config import Deployment
from flying_serving.layout.groups import world_rank
from flying_serving.vllm_adapter.assigned import assigned
from flying_serving.vllm_adapter.distributed.coordinator import LaneCoordinator


@dataclass(frozen=True)
class TorchWorld:
    """The torch world of a worker, which is a device of an engine.

    If groups need no torch world, an engine's torch world has its own devices
    only, and it may start while others run. Otherwise all engines are in one torch world.
    """

    deployment: Deployment
    engine: int
    device: int

    @property
    def rank(self) -> int:
        """The number of this device among the devices of all engines."""
        return world_rank(self.engine, self.device, self.deployment.engines)

    def address(self) -> tuple[str, int, int]:
        """The world's file, its size and this worker's rank. An engine that is started again gets a
        new world.
        """
        deployment, devices = self.deployment, self.deployment.devices
        if not deployment.one_world:
            return world_file(deployment, self.engine), devices, self.device
        return f"{deployment.run_dir}/world", deployment.engines * devices, self.rank

    def joined(self) -> AbstractContextManager[None]:
        """While the body runs, a worker of vLLM's that sets up its distributed environment joins
        this world.
        """
        return assigned(_world, self)

    def coordinator(self, partition: list[list[int]], name: str) -> Any:
        """Make the coordinator of this worker's group; all workers of the torch world call it
        together.
        """
        own = parallel_state.get_world_group()
        if self.deployment.one_world:
            backend = current_platform.dist_backend
            return parallel_state.init_model_parallel_group(
                partition,
                own.local_rank,
                backend,
                group_name=group_name(name, on_cpu=current_platform.is_cpu()),
            )
        if len(partition[0]) == 1:
            return parallel_state.get_tp_group()  # vLLM's, which needs no other rank either
        return LaneCoordinator(
            self.rank,
            partition,
            name,
            own.local_rank,
            device=own.device,
            collectives=self.deployment.collectives,
        )


def group_name(name: str, *, on_cpu: bool) -> str:
    """Return the name that vLLM's coordinator of a lane gets.

    On CUDA vLLM has its custom all-reduce for groups of the name `tp` only, up to a colon.
    """
    return name if on_cpu else f"tp:{name}"


_world: ContextVar[TorchWorld | None] = ContextVar("world", default=None)


def join_world(
    original: Any,
    vllm_config: Any,
    rank: int,
    distributed_init_method: str | None = None,
    local_rank: int = -1,
    backend: str = "nccl",
) -> None:
    """Wrap `init_worker_distributed_environment`: same signature, a world in the run directory,
    each rank alone.
    """
    world = _world.get()
    if world is None:
        original(vllm_config, rank, distributed_init_method, local_rank, backend)
        return
    path, size, rank = world.address()
    parallel_state.set_custom_all_reduce(not vllm_config.parallel_config.disable_custom_all_reduce)
    parallel_state.init_distributed_environment(
        size, rank, f"file://{path}", local_rank, backend, timedelta(seconds=START_TIMEOUT_S)
    )
    # every rank alone, in every dimension; the lanes' own groups replace its tensor-parallel one
    parallel_state.initialize_model_parallel(1)
