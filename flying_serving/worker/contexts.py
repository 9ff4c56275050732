"""Contexts that workers open on the CUDA devices of their peers, before KV memory is sized."""

from collections.abc import Callable
from itertools import product

import msgspec
import torch

from flying_serving.config import Deployment
from flying_serving.log import logger
from flying_serving.memory.arena import announce, announced
from flying_serving.memory.copiers import may_read
from flying_serving.memory.cuda_ipc import reads_directly

Reach = Callable[[torch.device, torch.device], bool]


class OwnDevice(msgspec.Struct, frozen=True):
    """The device of a worker. All processes of a node name devices alike."""

    device: str


class Opened(msgspec.Struct, frozen=True):
    """The devices of peers that a worker has asked for what it needs to read them."""

    devices: list[str]


class PeerContexts:
    """The contexts of all workers: each worker has one on the device of every peer whose memory it
    cannot open on its own.

    A context takes some hundred MiB of the device. vLLM's profile counts the memory that a device
    has lost to any process since its worker began. So it counts the contexts that are there when it
    ends: every worker opens its own first, and none profiles before.
    """

    def __init__(self, deployment: Deployment, engine: int, device: int) -> None:
        self._run_dir = deployment.run_dir
        self._own = (engine, device)
        self._workers = list(product(range(deployment.engines), range(deployment.devices)))

    def open(self, own: torch.device, reach: Reach) -> None:
        """Get what it takes to read the device of each peer that has another device than `own`.

        `reach`: `reach_memory` or `open_context`. Raises PeerMemory if a worker does not name its
        device in time.
        """
        announce(self._path("device", *self._own), OwnDevice(str(own)))
        devices = [self._device_of(*worker) for worker in self._workers]
        others = [device for device in dict.fromkeys(devices) if device != own]
        for other in others:
            if not reach(own, other):
                logger.warning(
                    "%s cannot read the memory of %s: KV is copied tile by tile", own, other
                )
        announce(self._path("contexts", *self._own), Opened([str(other) for other in others]))

    def wait(self) -> None:
        """Wait until all workers have opened theirs. Raises PeerMemory if one has not in time."""
        for engine, device in self._workers:
            whose = f"contexts of engine {engine} device {device}"
            announced(self._path("contexts", engine, device), Opened, whose)

    def _device_of(self, engine: int, device: int) -> torch.device:
        whose = f"device {device} of engine {engine}"
        named = announced(self._path("device", engine, device), OwnDevice, whose)
        return torch.device(named.device)

    def _path(self, kind: str, engine: int, device: int) -> str:
        return f"{self._run_dir}/{kind}-{engine}-{device}"


def reach_memory(own: torch.device, other: torch.device) -> bool:
    """Return whether kernels of `own` can read another CUDA device. Only if not, open a context
    there: handles are then opened on that device (`map_cuda`).
    """
    return reads_directly(own, other) or open_context(own, other)


def open_context(own: torch.device, other: torch.device) -> bool:
    """Open a context on another CUDA device. Returns whether kernels of `own` can read its
    memory.
    """
    torch.empty(1, device=other)
    return may_read(own, other)
