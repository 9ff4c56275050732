"""The choice of how tiles are copied."""

from collections.abc import Iterator

import pytest
import torch

from flying_serving.memory import copiers
from flying_serving.memory.copiers import copier_between, copy_tiles, may_read
from flying_serving.memory.tile_kernel import copy_by_kernel
from flying_serving.memory.tiles import copy_by_loop
from tests.unit.memory.tile_memories import Form, random_bytes, view_of

CPU, CUDA0, CUDA1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Peers:
    """The part of torch that `may_read` calls, for devices that are not there."""

    def __init__(self, reachable: bool) -> None:
        self.reachable = reachable
        self.asked: list[tuple[torch.device, torch.device]] = []
        self.copied: list[tuple[torch.device, torch.device]] = []

    def can_device_access_peer(self, device: torch.device, peer: torch.device) -> bool:
        self.asked.append((device, peer))
        return self.reachable

    def empty(self, size: int, device: torch.device) -> "Scratch":
        assert size == 1
        return Scratch(self, device)


class Scratch:
    """An element on a device."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.device = peers, device

    def copy_(self, source: "Scratch") -> None:
        self.peers.copied.append((source.device, self.device))


@pytest.fixture(params=[True, False], ids=["reachable", "apart"])
def peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    found = Peers(request.param)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", found.can_device_access_peer)
    monkeypatch.setattr(copiers.torch, "empty", found.empty)
    may_read.cache_clear()
    copier_between.cache_clear()
    yield found
    may_read.cache_clear()
    copier_between.cache_clear()


def test_the_cpu_copies_by_a_loop() -> None:
    assert copier_between(CPU, CPU) is copy_by_loop


def test_one_cuda_device_copies_by_the_kernel(peers: Peers) -> None:
    assert copier_between(CUDA0, CUDA0) is copy_by_kernel
    assert peers.asked == []


def test_another_cuda_device_is_read_by_the_kernel_if_it_can_be_reached(peers: Peers) -> None:
    expected = copy_by_kernel if peers.reachable else copy_by_loop
    assert copier_between(CUDA1, CUDA0) is expected
    assert peers.asked == [(CUDA0, CUDA1)]


def test_a_reader_gets_access_once_by_a_copy_to_the_source(peers: Peers) -> None:
    assert [may_read(CUDA0, CUDA1) for _ in range(2)] == [peers.reachable] * 2
    assert peers.copied == ([(CUDA0, CUDA1)] if peers.reachable else [])


def test_tiles_on_the_cpu_are_copied() -> None:
    form = Form(torch.float32, kv_heads=1, layers=1, head_size=2, block_tokens=2)
    source, target = random_bytes(form, 1), random_bytes(form, 2)
    views = [view_of(form, memory, 1, 0) for memory in (source, target)]
    copy_tiles(views[1].tiles_from(views[0], range(1), ([3], [4]), range(2)))
    parts = [view.parts[0].view(torch.int32) for view in views]
    assert torch.equal(parts[1][4], parts[0][3])
    assert not torch.equal(parts[1][3], parts[0][4])
