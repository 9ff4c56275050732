"""The log of what a start takes of a device's memory beside KV."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from flying_serving.worker import worker
from flying_serving.worker.lanes import DeviceLanes
from flying_serving.worker.memory_items import MemoryItems
from flying_serving.worker.worker import FlyingCPUWorker, FlyingGPUWorker
from tests.with_vllm.worker.configurations import LLAMA, configuration

MIB = 2**20


def test_each_item_is_what_the_device_has_lost_since_the_one_before() -> None:
    free = iter([900 * MIB, 700 * MIB, 690 * MIB])
    said: list[str] = []
    items = MemoryItems(lambda: next(free), said.append)
    items.taken("communicators of groups")
    items.taken("the model")
    assert said == ["memory of communicators of groups: 200 MiB", "memory of the model: 10 MiB"]


def test_gpu_worker_logs_its_model_and_its_lanes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver's figure of free memory is the only stand-in for the device."""
    free, said = [900 * MIB], list[str]()

    def take(mib: int) -> None:
        free[0] -= mib * MIB

    def lanes(lane1: Any, *_args: Any, **_options: Any) -> Any:
        take(20)
        made = DeviceLanes.__new__(DeviceLanes)
        made[1], made.input_rounding = lane1, 0.0
        return made

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 900 * MIB))
    monkeypatch.setattr(worker, "log_progress", lambda engine, rank, what: said.append(what))
    monkeypatch.setattr(Worker, "load_model", lambda self: take(300))
    monkeypatch.setattr(worker, "adapt_runner", lambda *_: None)
    monkeypatch.setattr(worker, "DeviceLanes", lanes)
    gpu: Any = FlyingGPUWorker.__new__(FlyingGPUWorker)
    gpu.engine = gpu.rank = 0
    gpu.device = torch.device("cuda", 0)
    gpu.deployment = SimpleNamespace(run_dir="", eager_where_refused=False)
    gpu.model_runner = gpu.communicators = None
    gpu.vllm_config = configuration(tmp_path, LLAMA)
    gpu.memory_log = gpu.memory_items()
    gpu.load_model()
    assert said[1:] == ["memory of the model: 300 MiB", "memory of lanes of groups: 20 MiB"]


def test_cpu_worker_logs_no_memory() -> None:
    assert FlyingCPUWorker.__new__(FlyingCPUWorker).memory_items() is None
