"""The KV memory of the other engines' devices, mapped when it is first read."""

from itertools import product

from flying_serving.memory.arena import Address, announce, announced
from flying_serving.memory.kv_view import KVAddress, KVView, map_memory


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

    def map_all(self, engines: int, devices: int) -> None:
        """Map all of them, when all are about to be announced. Raises PeerMemory if one cannot be mapped."""
        for engine, device in product(range(engines), range(devices)):
            self.view(engine, device, 1)

    def view(self, engine: int, device: int, size: int) -> KVView:
        """The lane for groups of `size` engines of a device. Raises PeerMemory if it cannot be mapped."""
        found = self._views.get((engine, device))
        if found is None:
            found = self._views[engine, device] = self._map(engine, device)
        return found[size]

    def _map(self, engine: int, device: int) -> dict[int, KVView]:
        whose = f"KV memory of engine {engine} device {device}"
        found = announced(_path(self._run_dir, engine, device), KVAddress, whose)
        memory = map_memory(found.memory, whose)
        return {size: KVView.over(memory, lane) for size, lane in found.lanes.items()}
