"""The KV memory of a device's arena in other processes: all lanes, by descriptors."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import msgspec
import pytest
import torch

from flying_serving.errors import PeerMemory
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.kv_view import KVView
from flying_serving.memory.peers import PeerKV
from flying_serving.memory.shared_arena import map_arena, share_arena
from tests.unit.memory.fake_cuda import PAGE, FakeDriver, fake_device

BLOCKS, OWN, LAYERS, BLOCK_BYTES = 16, 9, 3, PAGE // 4
"""An engine's blocks, its own ones among them, and the bytes of a block in a layer."""
READER = """
import sys
import msgspec
from flying_serving.memory.shared_arena import SharedArena, map_arena
from tests.unit.memory.fake_cuda import fake_device
shared = msgspec.json.decode(sys.argv[1], type=SharedArena)
memory = map_arena(shared, "it", fake_device())
print([int(memory[int(place)]) for place in sys.argv[2:]])
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """A run directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="flying-", dir="/tmp") as path:
        yield path


def own_kv(arena: CudaArena) -> list[torch.Tensor]:
    """Back the own blocks of each layer, and return all blocks of each."""
    for layer in range(LAYERS):
        arena.back(layer * BLOCKS * BLOCK_BYTES, OWN * BLOCK_BYTES)
    memory = arena.tensor(0, arena.size_bytes)
    return [part.view(BLOCKS, 1, 16, -1) for part in memory.split(BLOCKS * BLOCK_BYTES)]


def arena_of(driver: FakeDriver) -> CudaArena:
    return CudaArena(fake_device(driver), LAYERS * BLOCKS * BLOCK_BYTES)


@pytest.mark.deep
def test_another_process_reads_the_pieces(folder: str) -> None:
    arena = arena_of(FakeDriver())
    layers = own_kv(arena)
    for number, layer in enumerate(layers):
        layer[OWN - 1].fill_(number + 5)
    shared, server = share_arena(arena, f"{folder}/socket")
    places = [str((layer * BLOCKS + OWN) * BLOCK_BYTES - 1) for layer in range(LAYERS)]
    run = subprocess.run(
        [sys.executable, "-c", READER, msgspec.json.encode(shared).decode(), *places],
        capture_output=True,
        text=True,
        check=True,
    )
    server.close()
    assert json.loads(run.stdout) == [5, 6, 7]


def test_lanes_of_a_peer_are_views_of_its_arena(folder: str) -> None:
    """A released page of an extra block leaves the peer's memory as it is."""
    arena, reader = arena_of(FakeDriver()), FakeDriver(device=1)
    layers = own_kv(arena)
    shared, server = share_arena(arena, f"{folder}/socket")
    PeerKV(folder).share(1, 0, shared, {1: [KVView(layers, range(1), 16, 1)]})
    arena.back(0, arena.size_bytes)  # pages of extra blocks, which are not shared
    peers = PeerKV(folder, fake_device(reader))
    (view,) = peers.views(1, 0, 1)
    layers[2][4].fill_(9)
    assert bool((view.parts[2][4] == 9).all())
    assert sum(size for _, size in reader.mapped.values()) < arena.backed_bytes
    arena.release(0, arena.size_bytes)
    assert bool((view.parts[2][4] == 9).all())
    del view
    peers.unmap([1])
    assert reader.leaves_nothing
    server.close()


def test_arena_that_cannot_be_mapped_is_named(folder: str) -> None:
    arena, reader = arena_of(FakeDriver()), FakeDriver()
    own_kv(arena)
    shared, server = share_arena(arena, f"{folder}/socket")
    device = fake_device(reader)
    whose = "KV memory of engine 1 device 0"
    refused = pytest.raises(PeerMemory, match=rf"^{whose}: cuMemMap: CUDA_ERROR_INVALID_VALUE")
    with reader.refusing("cuMemMap", after=1), refused:
        map_arena(shared, whose, device)
    assert reader.leaves_nothing
    server.close()
    with pytest.raises(PeerMemory, match=rf"^{whose}: .*/socket gave 0 of \d descriptors"):
        map_arena(shared, whose, device)


def test_socket_of_an_ended_process_is_replaced(folder: str) -> None:
    arena = arena_of(FakeDriver())
    own_kv(arena)
    _, ended = share_arena(arena, f"{folder}/socket")
    shared, server = share_arena(arena, f"{folder}/socket")
    assert map_arena(shared, "it", fake_device()).shape == (arena.size_bytes,)
    server.close()
    ended.close()
