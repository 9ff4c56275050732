"""The log of what a start takes of a device's memory beside KV."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from flying_serving.worker import worker
from flying_serving.worker.memory_items import MemoryItems
from flying_serving.worker.worker import FlyingCPUWorker, FlyingGPUWorker

MIB = 2**20


def test_each_item_is_what_the_device_has_lost_since_the_one_before() -> None:
    free = iter([900 * MIB, 700 * MIB, 690 * MIB])
    said: list[str] = []
    items = MemoryItems(lambda: next(free), said.append)
    items.taken("communicators of groups")
    items.taken("the model")
    assert said == ["memory of communicators of groups: 200 MiB", "memory of the model: 10 MiB"]


def test_gpu_worker_logs_its_model_and_its_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's figure of free memory is the only stand-in for the device."""
    free, said = [900 * MIB], list[str]()

    def take(mib: int) -> None:
        free[0] -= mib * MIB

    def lanes(*_args: Any, **_options: Any) -> None:
        take(20)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 900 * MIB))
    monkeypatch.setattr(worker, "phase", lambda engine, rank, what: said.append(what))
    monkeypatch.setattr(Worker, "load_model", lambda self: take(300))
    monkeypatch.setattr(worker, "adapt_runner", lambda *_: None)
    monkeypatch.setattr(worker, "Runner", lambda *_: None)
    monkeypatch.setattr(worker, "WorkerLanes", lanes)
    gpu: Any = FlyingGPUWorker.__new__(FlyingGPUWorker)
    gpu.engine = gpu.rank = 0
    gpu.device, gpu.deployment = torch.device("cuda", 0), SimpleNamespace(run_dir="")
    gpu.model_runner = gpu.vllm_config = gpu.communicators = None
    gpu.memory_log = gpu.memory_items()
    gpu.load_model()
    assert said[1:] == ["memory of the model: 300 MiB", "memory of lanes of groups: 20 MiB"]


def test_cpu_worker_logs_no_memory() -> None:
    assert FlyingCPUWorker.__new__(FlyingCPUWorker).memory_items() is None
