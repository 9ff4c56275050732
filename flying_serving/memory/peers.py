"""The KV memory of the other engines' devices, mapped when it is first read."""

import time
from pathlib import Path

import msgspec

from flying_serving.errors import PeerMemory
from flying_serving.memory.arena import Address, announce
from flying_serving.memory.kv_view import KVAddress, KVView, map_memory

ANNOUNCED_S = 60.0
"""How long it is waited for a peer, which may come later to the end of its start."""


def _path(run_dir: str, engine: int, device: int) -> str:
    return f"{run_dir}/kv-{engine}-{device}"


def announce_kv(run_dir: str, engine: int, device: int, memory: Address | bytes, views: dict[int, KVView]) -> None:
    """Let peers read the lanes of a device, by group size."""
    lanes = {size: view.shape() for size, view in views.items()}
    announce(_path(run_dir, engine, device), KVAddress(memory, lanes))


class PeerKV:
    """The lanes of all devices of a server, as they were announced in its run directory."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._views: dict[tuple[int, int], dict[int, KVView]] = {}

    def view(self, engine: int, device: int, size: int) -> KVView:
        """The lane for groups of `size` engines of a device. Raises PeerMemory if it cannot be mapped."""
        found = self._views.get((engine, device))
        if found is None:
            found = self._views[engine, device] = self._map(engine, device)
        return found[size]

    def _map(self, engine: int, device: int) -> dict[int, KVView]:
        whose = f"KV memory of engine {engine} device {device}"
        path = Path(_path(self._run_dir, engine, device))
        until_s = time.monotonic() + ANNOUNCED_S
        while not path.exists():
            if time.monotonic() > until_s:
                raise PeerMemory(f"{whose}: it was not announced in {path} for {ANNOUNCED_S:g} s")
            time.sleep(0.01)
        found = msgspec.json.decode(path.read_bytes(), type=KVAddress)
        memory = map_memory(found.memory, whose)
        return {size: KVView.over(memory, lane) for size, lane in found.lanes.items()}
