"""vLLM places no worker of ours, and shared memory of a group lies on all of its NUMA nodes."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig
from vllm.v1.engine.utils import set_assigned_physical_gpu_ids_for_dp_rank

from flying_serving.comm.shm import ShmGroup
from flying_serving.vllm_adapter.numa import (
    interleave,
    leave_placement_to_workers,
    let_devices_share_nodes,
)

REFUSED = "memory of a group is not spread over its NUMA nodes"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory."""
    with TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def policies(path: Path) -> list[str]:
    """The kernel's words for where pages of a file lie that this process has mapped."""
    lines = Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines()
    return [line.split()[1] for line in lines if f"file={path}" in line]


def test_memory_of_a_group_is_interleaved_over_its_nodes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file's pages, for whichever process needs them. A container may forbid it, which is
    told.
    """
    group = ShmGroup(str(folder / "group"), 0, 2, spread=lambda memory: interleave(memory, [0]))
    assert policies(folder / "group") == ["interleave:0"] or REFUSED in caplog.text
    group.close()


def test_memory_of_a_group_is_spread_before_it_has_pages(folder: Path) -> None:
    blocks: list[int] = []
    path = folder / "group"

    def spread(memory: mmap.mmap) -> None:
        blocks.append(path.stat().st_blocks)

    ShmGroup(str(path), 0, 2, spread=spread).close()
    assert blocks == [0]
    assert path.stat().st_blocks > 0


def test_nodes_that_do_not_exist_are_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        interleave(memory, [1023])
    assert REFUSED in caplog.text


def test_vllm_places_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    leave_placement_to_workers()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_SIM_MULTI_NUMA" not in os.environ


@pytest.mark.parametrize("engine", range(2))
def test_vllm_starts_more_engines_than_there_are_memory_nodes(
    monkeypatch: pytest.MonkeyPatch, engine: int
) -> None:
    """It gives an engine the numbers of its devices when it starts the engine."""
    monkeypatch.setenv("CPU_VISIBLE_MEMORY_NODES", "0")
    config = SimpleNamespace(
        parallel_config=ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
    )
    let_devices_share_nodes(config.parallel_config)
    set_assigned_physical_gpu_ids_for_dp_rank(
        config, engine, config.parallel_config.assigned_physical_gpu_ids
    )
    assert config.parallel_config.assigned_physical_gpu_ids == [2 * engine, 2 * engine + 1]


def test_device_numbers_that_a_user_gives_are_kept() -> None:
    parallel = ParallelConfig(data_parallel_size=2, assigned_physical_gpu_ids=[3, 1])
    let_devices_share_nodes(parallel)
    assert parallel.assigned_physical_gpu_ids == [3, 1]
