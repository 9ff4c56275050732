"""The choice of how tiles of KV are copied, by the devices of source and target."""

from collections.abc import Callable
from functools import cache

import torch

from flying_serving.memory.tiles import TileCopy, copy_by_loop


def copy_tiles(tiles: TileCopy) -> None:
    """Copy tiles, on CUDA in the order of the target's current stream."""
    source, target = tiles.stacks[0]
    copier_between(source.device, target.device)(tiles)


@cache
def copier_between(source: torch.device, target: torch.device) -> Callable[[TileCopy], None]:
    """Return how tiles are copied between two devices: by a kernel where the target's can read the
    source, otherwise one by one.
    """
    if target.type != "cuda" or not may_read(target, source):
        return copy_by_loop
    # Triton is imported where a kernel runs only
    from flying_serving.memory.tile_kernel import copy_by_kernel

    return copy_by_kernel


@cache
def may_read(reader: torch.device, source: torch.device) -> bool:
    """Return whether kernels of one CUDA device can read memory of another. If they can, they may
    from now on.
    """
    if reader == source:
        return True
    if not torch.cuda.can_device_access_peer(reader, source):
        return False
    # torch lets a device reach another one when it first copies to it
    torch.empty(1, device=source).copy_(torch.empty(1, device=reader))
    return True
