"""Turn vLLM's configuration into a deployment of engines with lanes, before the engines start."""

import os
from multiprocessing import resource_tracker
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from flying_serving.config import (
    KEY,
    ONE_WORLD,
    Collectives,
    Deployment,
    FlyingConfig,
    parse_flying,
)
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.log import logger
from flying_serving.observe.tracing.file import begin_trace
from flying_serving.placement.plan import BIND, WITHOUT_EFFECT, Placement, device_name, plan
from flying_serving.placement.topology import read_topology
from flying_serving.policy.policies import POLICIES
from flying_serving.server.start.capabilities import refuse_unsupported
from flying_serving.server.start.devices import collectives_of, number_devices, share_devices
from flying_serving.server.start.environment import (
    refuse_expandable_segments,
    sum_without_flashinfer,
)
from flying_serving.server.start.execution import keep_no_compiled_code, settle_execution
from flying_serving.server.start.experts import choose_expert_kernel
from flying_serving.server.start.rundir import make_run_dir
from flying_serving.server.start.support import ASYNC_GROUPS_KEY, adapt_caches, choose_group_sizes
from flying_serving.vllm_adapter.model_runner.rank_widths import degrees_differ
from flying_serving.vllm_adapter.scheduler.history import FOLLOWS_OUTPUTS, stateful_processors
from flying_serving.worker.weightless_model import obstacles

_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "flying_serving.worker.worker.FlyingCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "flying_serving.worker.worker.FlyingGPUWorker",
}


def prepare(config: Any, client_count: int) -> Any:
    """Check the configuration and write the deployment into it. Returns the executor class of the
    engines.

    Raises:
        ConfigError: with one line that names the flag, its value and the allowed values.
    """
    flying = adapt(config, client_count)
    collectives = _divide_devices(config, flying)
    parallel = config.parallel_config
    policy = POLICIES[flying.policy]
    if policy.by_priority:
        config.scheduler_config.policy = "priority"
    sizes, not_offered = _lane_sizes(config, flying, collectives)
    _warn_of_fixed_groups(config.model_config)
    # for all: it removes the shared memory of workers that vLLM kills at the end
    resource_tracker.ensure_running()
    run_dir = make_run_dir()
    os.environ.setdefault("VLLM_RPC_BASE_PATH", run_dir)  # vLLM's sockets, which it leaves behind
    deployment = Deployment(
        run_dir=run_dir,
        engines=parallel.data_parallel_size,
        devices=parallel.tensor_parallel_size,
        group_sizes=sizes,
        not_offered=not_offered,
        collectives=collectives,
        survives=survives(flying, parallel.data_parallel_size, collectives),
        incarnations=(0,) * parallel.data_parallel_size,
        # vLLM turns it off on the CPU, where the user may still want it for groups
        async_groups=bool(config.additional_config.get(ASYNC_GROUPS_KEY)),
        eager_where_refused=flying.cuda_graphs is not True and not current_platform.is_cpu(),
        placements=placements_of(parallel),
        flying=flying,
    )
    if flying.trace_out is not None:
        begin_trace(flying.trace_out)
    config.additional_config = {**config.additional_config, KEY: deployment.model_dump()}
    parallel.worker_cls = _WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    config.cache_config.enable_prefix_caching = bool(config.cache_config.enable_prefix_caching)
    if current_platform.is_cpu():
        number_devices(parallel)
        _preload()
    if deployment.devices > 1:
        return MultiprocExecutor
    parallel.distributed_executor_backend = UniProcExecutor
    return UniProcExecutor


def adapt(config: Any, client_count: int) -> FlyingConfig:
    """Refuse what no server of ours serves, and let vLLM's configuration suit lanes. Returns the
    user's settings. Raises ConfigError as `prepare`.
    """
    flying = parse_flying(config.additional_config[KEY] or {})
    refuse_unsupported(config, flying, client_count)
    _refuse_unusable(config)
    adapt_caches(config)
    choose_expert_kernel(config, flying)
    return flying


def _lane_sizes(
    config: Any, flying: FlyingConfig, collectives: Collectives
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the group sizes that get lanes, and why the others are not offered, which is logged.

    Raises ConfigError as `choose_group_sizes` and `sum_without_flashinfer`.
    """
    sizes, not_offered = choose_group_sizes(config, flying.group_sizes, obstacles)
    for size, reason in not_offered.items():
        logger.warning("group size %d is not offered: %s", size, reason)
    pinned_size = POLICIES[flying.policy].pinned_size
    if pinned_size is not None:
        # a fixed layout needs no other sizes than its own and 1, which every engine has
        sizes = tuple(sorted({1, pinned_size(sizes)}))
    if not current_platform.is_cpu():
        devices = config.parallel_config.tensor_parallel_size
        sum_without_flashinfer(os.environ, sizes, devices, collectives)
    return sizes, not_offered


def _warn_of_fixed_groups(model: Any) -> None:
    """Log why requests of this model (vLLM's ModelConfig) stay in their groups, if they do."""
    reasons = [f"{name} has no {FOLLOWS_OUTPUTS} = True" for name in stateful_processors(model)]
    if degrees_differ(model):
        reasons.append(f"groups of another size compute other outputs of {model.architecture}")
    for reason in reasons:
        logger.warning("requests that have begun keep their groups: %s", reason)


def _divide_devices(config: Any, flying: FlyingConfig) -> Collectives:
    """Let engines share GPUs if they are to, and settle how lanes run on them. Returns how they
    exchange tensors.
    """
    on_cpu = current_platform.is_cpu()
    collectives = collectives_of(flying, on_cpu=on_cpu)
    share_devices(config, flying, current_platform.device_id_to_physical_device_id, on_cpu=on_cpu)
    settle_execution(config, flying, collectives)
    keep_no_compiled_code(config)
    return collectives


def _refuse_unusable(config: Any) -> None:
    """Refuse settings of vLLM and of torch that do not work with our workers."""
    if not current_platform.is_cpu():
        refuse_expandable_segments(os.environ)
    worker_cls = config.parallel_config.worker_cls
    if worker_cls not in _WORKERS and not _has_lanes(worker_cls):
        raise Unsupported(
            f"--worker-cls={worker_cls}: one of {sorted(_WORKERS)}, or a subclass of LaneWorker, "
            "is needed"
        )


def _has_lanes(worker_cls: str) -> bool:
    """Return whether the name is that of a worker class of ours."""
    from flying_serving.worker.worker import LaneWorker

    try:
        found = resolve_obj_by_qualname(worker_cls)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, LaneWorker)


def survives(flying: FlyingConfig, engines: int, collectives: Collectives) -> bool:
    """Return whether a server goes on when an engine is lost.

    It does where its groups need no torch world, and each engine has all weights.

    Raises:
        ConfigError: if --min-engines is more than there are, or a frozen engine would be noticed
            too late.
    """
    if flying.min_engines > engines:
        raise ConfigError(
            f"--min-engines={flying.min_engines}: at most {engines}, --data-parallel-size"
        )
    independent = engines > 1 and collectives not in ONE_WORLD
    survives_losses = independent and not flying.lend_weights
    # engines that wait for a frozen one would end before it is noticed
    if survives_losses and flying.engine_timeout_s > flying.collective_timeout_s:
        allowed = f"at most {flying.collective_timeout_s:g}, --collective-timeout-s"
        raise ConfigError(f"--engine-timeout-s={flying.engine_timeout_s:g}: {allowed}")
    return survives_losses


def placements_of(parallel: Any) -> tuple[Placement, ...]:
    """Return the placements of the devices of all engines of a ParallelConfig; none on CUDA.

    Raises:
        ConfigError: if a user's variables ask for something that this machine does not allow.
    """
    if not current_platform.is_cpu():
        return ()
    for name in WITHOUT_EFFECT:
        if os.environ.get(name, "0") not in ("", "0"):
            logger.warning("%s: no effect; %s can list fewer cores", name, BIND)
    return plan(
        read_topology(), os.environ, parallel.data_parallel_size, parallel.tensor_parallel_size
    )


def places_in_words(parallel: Any) -> list[tuple[str, str]]:
    """Return the name of each device of all engines of a ParallelConfig, and its placement; none on
    CUDA. Raises ConfigError as `placements_of`.
    """
    return [
        (device_name(index, parallel.tensor_parallel_size), str(placement))
        for index, placement in enumerate(placements_of(parallel))
    ]


def _preload() -> None:
    """Import the modules that engines need before they are forked, so that it is done once and its
    pages are shared.
    """
    import flying_serving.engine.core
    import flying_serving.worker.worker  # noqa: F401

    current_platform.import_kernels()
    # a fork lacks the OpenMP threads that this process starts, and would wait for them
    torch.set_num_threads(1)
