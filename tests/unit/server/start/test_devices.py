"""GPUs of engines, and how engines exchange tensors, decided from a configuration of vLLM."""

import logging
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from flying_serving.config import FlyingConfig
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.server.start.devices import collectives_of, share_devices

VISIBLE = (3, 5)
"""Ids of the GPUs that the server sees."""


def vllm_config(engines: int, devices: int = 1, **changes: Any) -> Any:
    """Return the part of a VllmConfig that is read and written."""
    cache = {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.9}
    parallel = {
        "data_parallel_size": engines,
        "tensor_parallel_size": devices,
        "assigned_physical_gpu_ids": None,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **parallel | {name: changes[name] for name in parallel if name in changes}
        ),
        cache_config=SimpleNamespace(
            **cache | {name: changes[name] for name in cache if name in changes}
        ),
    )


def share(config: Any, per_device: int, *, on_cpu: bool = False) -> Any:
    """Let `per_device` engines share each GPU; return the GPU of each device of each engine."""
    flying = FlyingConfig(engines_per_device=per_device)
    share_devices(config, flying, VISIBLE.__getitem__, on_cpu=on_cpu)
    return config.parallel_config.assigned_physical_gpu_ids


@pytest.mark.parametrize(
    ("engines", "devices", "per_device", "expected"),
    [
        (2, 1, 2, [3, 3]),
        (4, 1, 4, [3, 3, 3, 3]),
        (4, 1, 2, [3, 3, 5, 5]),
        (2, 2, 2, [3, 5, 3, 5]),
        (2, 1, 1, None),  # vLLM's own choice
    ],
)
def test_engines_get_their_gpus_in_the_order_of_their_numbers(
    engines: int, devices: int, per_device: int, expected: list[int] | None
) -> None:
    assert share(vllm_config(engines, devices), per_device) == expected


def test_gpus_are_of_the_users_list_where_there_is_one() -> None:
    config = vllm_config(4, assigned_physical_gpu_ids=[7, 6])
    assert share(config, 2) == [7, 7, 6, 6]


@pytest.mark.parametrize(("per_device", "expected"), [(1, 0.9), (2, 0.45)])
def test_engines_of_a_gpu_divide_the_memory_that_vllm_may_use(
    per_device: int, expected: float
) -> None:
    config = vllm_config(2)
    share(config, per_device)
    assert config.cache_config.gpu_memory_utilization == pytest.approx(expected)


def test_engines_on_one_gpu_are_announced_as_a_setting_for_tests(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    share(vllm_config(4), 2)
    assert "--engines-per-device=2: for tests: 2 engines share each GPU of [3, 5]" in caplog.text
    assert "--gpu-memory-utilization=0.45" in caplog.text


def test_setting_changes_nothing_on_the_cpu_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = vllm_config(2, kv_cache_memory_bytes=None)
    assert share(config, 2, on_cpu=True) is None
    assert config.cache_config.gpu_memory_utilization == 0.9
    assert "--engines-per-device=2: changes nothing on the CPU" in caplog.text


@pytest.mark.parametrize(
    ("config", "per_device", "says"),
    [
        (vllm_config(2), 3, "--engines-per-device=3: must divide 2, --data-parallel-size"),
        (vllm_config(2), 4, "--engines-per-device=4: must divide 2, --data-parallel-size"),
        (
            vllm_config(2, kv_cache_memory_bytes=None),
            2,
            "--engines-per-device=2: needs --kv-cache-memory-bytes, the KV memory of one engine",
        ),
        (
            vllm_config(8),
            2,
            "--engines-per-device=2: 8 engines of 1 devices need 4 GPUs",
        ),
    ],
)
def test_impossible_sharing_is_refused_by_flag_and_value(
    config: Any, per_device: int, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        share(config, per_device)
    assert str(refused.value).startswith(says)


def test_engines_that_cannot_be_divided_are_refused_on_the_cpu_too() -> None:
    with pytest.raises(ConfigError, match="must divide 2"):
        share(vllm_config(2), 4, on_cpu=True)


@pytest.mark.parametrize(
    ("settings", "on_cpu", "expected"),
    [
        ({}, True, "shm"),
        ({"cpu_collectives": "gloo"}, True, "gloo"),
        ({"cpu_collectives": "staged"}, True, "staged"),
        ({"cuda_collectives": "nccl"}, True, "shm"),
        ({"engines_per_device": 2}, True, "shm"),
        ({}, False, "nccl"),
        ({"cpu_collectives": "gloo"}, False, "nccl"),
        ({"cuda_collectives": "staged"}, False, "staged"),
        ({"cuda_collectives": "pynccl"}, False, "pynccl"),
        ({"engines_per_device": 2}, False, "staged"),
    ],
)
def test_collectives_follow_the_platform_and_its_setting(
    settings: dict[str, Any], on_cpu: bool, expected: str
) -> None:
    assert collectives_of(FlyingConfig(**settings), on_cpu=on_cpu) == expected


@pytest.mark.parametrize("name", ["nccl", "pynccl"])
def test_nccl_between_engines_on_one_gpu_is_refused(name: Literal["nccl", "pynccl"]) -> None:
    flying = FlyingConfig(engines_per_device=2, cuda_collectives=name)
    with pytest.raises(ConfigError, match=rf"^--cuda-collectives={name}: .* needs staged$"):
        collectives_of(flying, on_cpu=False)


@pytest.mark.parametrize(
    ("settings", "collectives"),
    [
        ({}, "nccl"),
        ({"cuda_collectives": "staged"}, "staged"),
        ({"cuda_collectives": "pynccl"}, "pynccl"),
        ({"engines_per_device": 2}, "staged"),
    ],
)
def test_cuda_graphs_are_taken_with_all_collectives(settings: Any, collectives: str) -> None:
    """Groups that cannot have them stay eager."""
    flying = FlyingConfig(cuda_graphs=True, **settings)
    assert collectives_of(flying, on_cpu=False) == collectives
