"""Numbers of devices on the CPU, as vLLM reads them."""

from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig
from vllm.v1.engine.utils import set_assigned_physical_gpu_ids_for_dp_rank

from flying_serving.server.start.devices import number_devices


@pytest.mark.parametrize("engine", range(2))
def test_vllm_starts_more_engines_than_there_are_memory_nodes(
    monkeypatch: pytest.MonkeyPatch, engine: int
) -> None:
    """It gives an engine the numbers of its devices when it starts the engine."""
    monkeypatch.setenv("CPU_VISIBLE_MEMORY_NODES", "0")
    config = SimpleNamespace(
        parallel_config=ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    )
    number_devices(config.parallel_config)
    set_assigned_physical_gpu_ids_for_dp_rank(
        config, engine, config.parallel_config.assigned_physical_gpu_ids
    )
    assert config.parallel_config.assigned_physical_gpu_ids == [2 * engine, 2 * engine + 1]


def test_device_numbers_that_a_user_gives_are_kept() -> None:
    parallel = ParallelConfig(data_parallel_size=2, assigned_physical_gpu_ids=[3, 1])
    number_devices(parallel)
    assert parallel.assigned_physical_gpu_ids == [3, 1]
