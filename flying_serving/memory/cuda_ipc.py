"""KV memory of a CUDA device in other processes of its node, by CUDA IPC handles."""

import pickle

import torch
from torch.multiprocessing import reductions

from flying_serving.errors import PeerMemory

_DEVICE, _WAITS = 6, 14
"""Of torch's arguments for a handle: the device that opens it, and whether it waits for the owner's
kernels before.
"""


def share_cuda(memory: torch.Tensor) -> bytes:
    """Return a handle, with which another process maps memory of a CUDA device.

    This process cannot open it itself. Run once on CUDA (docs/gpu.md).
    """
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)  # not all readers wait for what is under way
    return pickle.dumps(reductions.reduce_tensor(memory))


def map_cuda(handle: bytes, whose: str, reader: torch.device | None) -> torch.Tensor:
    """Map a peer's memory as int8. `reader`: this process's device; None: the peer's is used.

    Where kernels of the reader can read the peer's device, the handle is opened on the reader, and
    the tensor is one of the reader. Opened on the peer's device, as torch does, it would need a
    context there, of some hundred MiB. It has not run on two devices.

    Raises:
        PeerMemory: if it cannot be mapped.
    """
    rebuild, args = pickle.loads(handle)
    if rebuild is reductions.rebuild_cuda_tensor and reader is not None:
        args = _opened_on(reader, args)
    try:
        found: torch.Tensor = rebuild(*args)
    except RuntimeError as error:
        raise PeerMemory(f"{whose}: its CUDA IPC handle cannot be opened ({error})") from None
    return found


def reads_directly(reader: torch.device, owner: torch.device) -> bool:
    """Return whether kernels of one CUDA device can read memory of another."""
    return reader == owner or torch.cuda.can_device_access_peer(reader, owner)


def _opened_on(reader: torch.device, args: tuple[object, ...]) -> tuple[object, ...]:
    owner = torch.device("cuda", args[_DEVICE])  # type: ignore[arg-type]
    if reader == owner or not reads_directly(reader, owner):
        return args
    changed = list(args)
    changed[_DEVICE], changed[_WAITS] = reader.index, False
    return tuple(changed)
