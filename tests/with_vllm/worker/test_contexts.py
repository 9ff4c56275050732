"""Contexts on peers' devices: opened by all workers before any sizes its KV memory."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flying_serving.config import Deployment, FlyingConfig
from flying_serving.errors import PeerMemory
from flying_serving.worker import contexts, worker
from flying_serving.worker.contexts import PeerContexts, open_context, reach_memory
from flying_serving.worker.worker import FlyingGPUWorker, LaneWorker
from tests.unit.memory.fake_cuda import PAGE, FakeDriver

CUDA = [torch.device("cuda", number) for number in range(4)]


def deployment(
    run_dir: Path, engines: int = 2, devices: int = 2, lend_weights: bool = False
) -> Deployment:
    return Deployment(
        run_dir=str(run_dir),
        engines=engines,  # type: ignore[arg-type]
        devices=devices,
        group_sizes=(1, engines),
        flying=FlyingConfig(lend_weights=lend_weights),
    )


def opened_by_all(
    run_dir: Path, devices: dict[tuple[int, int], torch.device], reachable: bool = True
) -> dict[tuple[int, int], list[torch.device]]:
    """Return the devices on which each of two engines' two workers has opened a context."""
    found: dict[tuple[int, int], list[torch.device]] = {worker: [] for worker in devices}

    def start(place: tuple[int, int]) -> None:
        def reach(own: torch.device, other: torch.device) -> bool:
            assert own == devices[place]
            found[place].append(other)
            return reachable

        own = PeerContexts(deployment(run_dir), *place)
        own.open(devices[place], reach)
        own.wait()

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(start, devices))
    return found


def test_each_worker_has_a_context_on_each_other_device(tmp_path: Path) -> None:
    places = dict(zip(product(range(2), range(2)), CUDA, strict=True))
    for place, others in opened_by_all(tmp_path, places).items():
        assert others == [device for device in CUDA if device != places[place]]


def test_a_device_that_workers_share_is_opened_once(tmp_path: Path) -> None:
    places = {(0, 0): CUDA[0], (0, 1): CUDA[1], (1, 0): CUDA[0], (1, 1): CUDA[1]}
    found = opened_by_all(tmp_path, places)
    assert found[0, 0] == found[1, 0] == [CUDA[1]]
    assert found[0, 1] == found[1, 1] == [CUDA[0]]


def test_a_device_that_cannot_be_reached_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[tuple[Any, ...]] = []
    monkeypatch.setattr(contexts.logger, "warning", lambda *args: warnings.append(args))
    places = dict(zip(product(range(2), range(2)), CUDA, strict=True))
    opened_by_all(tmp_path, places, reachable=False)
    assert {args[1:] for args in warnings} == set(product(CUDA, CUDA)) - {(d, d) for d in CUDA}


def test_a_worker_waits_until_all_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flying_serving.memory.arena.ANNOUNCED_S", 0.05)
    ours, theirs = (PeerContexts(deployment(tmp_path, devices=1), e, 0) for e in range(2))
    with pytest.raises(PeerMemory, match=r"^device 0 of engine 1: not announced"):
        ours.open(CUDA[0], lambda own, other: True)

    def reach(own: torch.device, other: torch.device) -> bool:
        with pytest.raises(PeerMemory, match=r"^contexts of engine 0 device 0: not announced"):
            ours.wait()
        return True

    theirs.open(CUDA[1], reach)
    ours.open(CUDA[0], lambda own, other: True)
    ours.wait()


def test_a_context_is_opened_by_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda size, device: calls.append(device))
    monkeypatch.setattr(contexts, "may_read", lambda own, other: calls.append((own, other)))
    open_context(CUDA[0], CUDA[1])
    assert calls == [CUDA[1], (CUDA[0], CUDA[1])]


@pytest.mark.parametrize("reachable", [False, True])
def test_context_is_opened_only_where_memory_cannot_be_read_without(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reachable)
    monkeypatch.setattr(torch, "empty", lambda size, device: calls.append(device))
    monkeypatch.setattr(contexts, "may_read", lambda own, other: False)
    assert reach_memory(CUDA[0], CUDA[1]) == reachable
    assert calls == ([] if reachable else [CUDA[1]])


@pytest.mark.parametrize(("lends", "reach"), [(False, "reach_memory"), (True, "open_context")])
def test_a_gpu_worker_reaches_its_peers_before_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lends: bool, reach: str
) -> None:
    events: list[str] = []

    def init_device(self: Any) -> None:
        events.append("device")
        self.deployment = deployment(tmp_path, lend_weights=lends)
        self.engine, self.rank, self.device = 1, 0, CUDA[2]

    def profile(self: Any) -> int:
        events.append("profile")
        return 7

    def of(place: Any, engine: int, device: int) -> Any:
        assert (place.run_dir, engine, device) == (str(tmp_path), 1, 0)
        return SimpleNamespace(
            open=lambda own, reach: events.append(f"open {own} {reach.__name__}"),
            wait=lambda: events.append("wait"),
        )

    monkeypatch.setattr(LaneWorker, "init_device", init_device)
    monkeypatch.setattr(LaneWorker, "determine_available_memory", profile)
    monkeypatch.setattr(worker, "PeerContexts", of)
    monkeypatch.setattr(worker, "cuda_driver", lambda: FakeDriver(device=2))
    gpu = FlyingGPUWorker.__new__(FlyingGPUWorker)
    gpu.init_device()
    assert gpu.determine_available_memory() == 7
    assert events == ["device", f"open cuda:2 {reach}", "wait", "profile"]


@pytest.mark.parametrize("lends", [False, True])
def test_gpu_worker_has_an_arena_only_if_weights_may_be_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lends: bool
) -> None:
    def init_device(self: Any) -> None:
        self.deployment = deployment(tmp_path, devices=1, lend_weights=lends)
        self.engine, self.rank, self.device = 0, 0, CUDA[2]

    driver = FakeDriver(device=2)
    monkeypatch.setattr(LaneWorker, "init_device", init_device)
    monkeypatch.setattr(worker, "cuda_driver", lambda: driver)
    monkeypatch.setattr(PeerContexts, "open", lambda self, own, reach: None)
    gpu = FlyingGPUWorker.__new__(FlyingGPUWorker)
    gpu.init_device()
    assert gpu.maps_kv == (gpu.cuda is not None) == lends
    assert gpu.cuda is None or gpu.cuda.page_bytes == PAGE
