"""KV memory that workers announce and peers map: all lanes of every device."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flying_serving.errors import PeerMemory
from flying_serving.memory.arena import Address, Arena
from flying_serving.memory.kv_view import KVView, bytes_of, map_memory
from flying_serving.memory.peers import PeerKV, announce_kv
from flying_serving.migration import transfer
from flying_serving.worker.lanes import DeviceLanes

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 5, 4, 4, 2, 2


def lanes(memory: torch.Tensor, dtype: torch.dtype) -> dict[int, list[KVView]]:
    """Lanes of an engine over the same bytes, keys transposed, as on a CPU."""
    found = {}
    for size in (1, 2, 4):
        heads, tokens = HEADS // size, TOKENS * size
        parts = []
        for layer in memory.view(dtype).view(LAYERS, BLOCKS, heads, 2 * tokens, SIZE):
            parts += [
                layer[:, :, :tokens].reshape(BLOCKS, heads, SIZE, tokens).transpose(2, 3),
                layer[:, :, tokens:],
            ]
        found[size] = [KVView(parts, range(heads), tokens, HEADS)]
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.uint8]
)
def test_peers_see_all_lanes_of_all_devices(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each under its engine, device and group size, as it is now."""
    size_bytes = LAYERS * BLOCKS * HEADS * 2 * TOKENS * SIZE * dtype.itemsize
    arenas = {place: Arena("kv", size_bytes) for place in ((0, 0), (0, 1), (3, 0))}
    announced = {}
    for (engine, device), arena in arenas.items():
        announced[engine, device] = lanes(bytes_of(arena.bytes), dtype)
        announce_kv(str(tmp_path), engine, device, arena.address, announced[engine, device])
    peers = PeerKV(str(tmp_path))
    for place, arena in arenas.items():
        peers.views(*place, 1)
        bytes_of(arena.bytes).copy_(torch.randint(0, 60, (size_bytes,), dtype=torch.int8))
    for place, views in announced.items():
        for size, (mine,) in views.items():
            (found,) = peers.views(*place, size)
            assert found.heads == mine.heads
            assert found.block_tokens == mine.block_tokens
            assert [(part.shape, part.stride(), part.dtype) for part in found.parts] == [
                (part.shape, part.stride(), dtype) for part in mine.parts
            ]
            for part, own in zip(found.parts, mine.parts, strict=True):
                assert torch.equal(
                    part.contiguous().view(torch.uint8), own.contiguous().view(torch.uint8)
                )
                assert part.data_ptr() != own.data_ptr()
            assert peers.views(*place, size)[0] is found


def test_memory_that_was_not_announced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that which is gone."""
    monkeypatch.setattr("flying_serving.memory.arena.ANNOUNCED_S", 0.05)
    peers = PeerKV(str(tmp_path))
    with pytest.raises(
        PeerMemory, match=r"KV memory of engine 2 device 1: not announced in .*/kv-2-1"
    ):
        peers.views(2, 1, 1)
    announce_kv(str(tmp_path), 2, 1, Address(1 << 22, 3, 4096), {})
    with pytest.raises(PeerMemory, match=r"KV memory of engine 2 device 1: .* cannot be opened"):
        peers.views(2, 1, 1)


def mapped_bytes(name: str) -> int:
    """Memory of this name that this process maps."""
    maps = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"/memfd:{name} " in line
    ]
    return sum(
        int(end, 16) - int(begin, 16) for begin, end in (found[0].split("-") for found in maps)
    )


def test_memory_of_a_lost_engine_is_unmapped(tmp_path: Path) -> None:
    """All lanes of all of its devices; it is mapped again when it is there again, with other
    memory.
    """
    size_bytes = 1 << 16
    arenas = [Arena(f"flying-test-{place}", size_bytes) for place in "abc"]
    for (engine, device), arena in zip([(1, 0), (1, 1), (2, 0)], arenas, strict=True):
        announce_kv(
            str(tmp_path),
            engine,
            device,
            arena.address,
            {1: [KVView([torch.zeros(2, 1, 4, 2)], range(1), 4, 1)]},
        )
    peers = PeerKV(str(tmp_path))
    peers.map([2], 1)
    peers.map([1], 2)
    assert peers.views(1, 1, 1)[0].stacks
    peers.unmap([1])
    assert [mapped_bytes(f"flying-test-{place}") for place in "abc"] == [
        size_bytes,
        size_bytes,
        2 * size_bytes,
    ]
    peers.map([1], 2)
    assert mapped_bytes("flying-test-b") == 2 * size_bytes


class Handles:
    """In place of CUDA's handles of memory: a process cannot open one of its own.

    `opener`: the process that is looked at.
    """

    def __init__(self) -> None:
        self.memories: dict[bytes, tuple[int, torch.Tensor]] = {}
        self.opener = 0

    def share(self, memory: torch.Tensor) -> bytes:
        """Give a handle."""
        handle = f"handle {len(self.memories)}".encode()
        self.memories[handle] = self.opener, memory
        return handle

    def open(self, memory: object, whose: str, cuda: None, reader: Any) -> torch.Tensor:
        """Map another process's memory."""
        assert isinstance(memory, bytes)
        owner, found = self.memories[memory]
        if owner == self.opener:
            raise PeerMemory(
                f"{whose}: its CUDA IPC handle cannot be opened (invalid device context)"
            )
        return found


def test_a_device_reads_its_own_memory_without_its_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that of the others by theirs, other devices of its engine too."""
    handles = Handles()
    monkeypatch.setattr("flying_serving.worker.lanes.share_cuda", handles.share)
    monkeypatch.setattr("flying_serving.memory.peers.map_memory", handles.open)
    workers: list[Any] = []
    for process, (engine, device) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        handles.opener = process
        memory = torch.full((64,), process, dtype=torch.int8)
        views = {1: [KVView([memory.view(2, 1, 4, 8)], range(1), 4, 1)]}
        lane1: Any = SimpleNamespace(kv=SimpleNamespace(memory=partial(torch.clone, memory)))
        lanes = DeviceLanes.__new__(DeviceLanes)
        lanes[1], lanes.kv_views, lanes.peers = lane1, views, PeerKV(str(tmp_path))
        lanes.engine, lanes.device, lanes.devices = engine, device, 2
        lanes.announce_kv(str(tmp_path), None)
        workers.append(lanes)
    for process, worker in enumerate(workers):
        handles.opener = process
        transfer.map_peers(worker, [0, 1])
        found = [
            worker.peers.views(engine, device, 1)[0].parts[0]
            for engine, device in product((0, 1), (0, 1))
        ]
        assert [part.flatten()[0].item() for part in found] == [0, 1, 2, 3]
        assert found[process] is worker.kv_views[1][0].parts[0]


def test_a_cuda_handle_is_carried_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bytes they are; who maps them gives the memory."""
    view = KVView([torch.zeros(2, 1, 4, 2)], range(1), 4, 1)
    announce_kv(str(tmp_path), 0, 0, b"\x80handle\xff", {1: [view]})
    told: list[object] = []

    def mapped(memory: object, whose: str, cuda: None, reader: Any) -> torch.Tensor:
        told.extend([memory, whose])
        return torch.arange(64, dtype=torch.int8)

    monkeypatch.setattr("flying_serving.memory.peers.map_memory", mapped)
    (found,) = PeerKV(str(tmp_path)).views(0, 0, 1)
    assert told == [b"\x80handle\xff", "KV memory of engine 0 device 0"]
    assert torch.equal(
        found.parts[0], torch.arange(64, dtype=torch.int8).view(torch.float32).view(2, 1, 4, 2)
    )


def test_memory_of_a_peer_is_int8() -> None:
    """All of it."""
    arena = Arena("kv", 8192)
    arena.bytes[8190:] = b"\x01\xff"
    found = map_memory(arena.address, "mine")
    assert found.dtype == torch.int8
    assert found.shape == (8192,)
    assert found[-2:].tolist() == [1, -1]
