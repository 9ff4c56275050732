"""An arena of a CUDA device that peers map by file descriptors."""

import os
from contextlib import suppress

import msgspec
import torch

from flying_serving.errors import DeviceMemory, PeerMemory
from flying_serving.memory.cuda_arena import CudaArena, PeerArena, Piece
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.memory.descriptors import DescriptorServer, receive_descriptors


class SharedArena(msgspec.Struct, frozen=True, tag=True):
    """The pieces of an arena that peers may map: a descriptor of each is given at `socket`."""

    socket: str
    size_bytes: int
    pieces: list[Piece]


def share_arena(arena: CudaArena, socket: str) -> tuple[SharedArena, DescriptorServer]:
    """Let peers map the memory that an arena has now. Memory that it gets later stays its own.

    Raises:
        DeviceMemory: if the driver does not export it.
    """
    with suppress(FileNotFoundError):  # of a process that has ended
        os.unlink(socket)
    shared = arena.share()
    server = DescriptorServer(socket, list(shared.values()))
    return SharedArena(socket, arena.size_bytes, list(shared)), server


def map_arena(shared: SharedArena, whose: str, device: CudaDevice) -> torch.Tensor:
    """Map a peer's arena for a device of this process, as int8. Only the pieces have memory.

    Raises:
        PeerMemory: naming whose it is, if it cannot be mapped.
    """
    descriptors = receive_descriptors(shared.socket, len(shared.pieces), whose)
    try:
        return PeerArena(device, shared.size_bytes, shared.pieces, descriptors).tensor()
    except DeviceMemory as error:
        raise PeerMemory(f"{whose}: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
