"""A stand-in for the NCCL library, behind the methods of vLLM's NCCLLibrary that PyNcclCommunicator
calls.

Ranks are threads of one process. As in NCCL, a collective waits for all ranks without a deadline,
until its communicator is aborted.
"""

import ctypes
import itertools
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum, ncclUniqueId

VERSION = 22800
DTYPES = {
    number: dtype
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32)
    for number in [ncclDataTypeEnum.from_torch(dtype)]
}


class Ring:
    """The ranks of one unique id."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.sent: dict[int, torch.Tensor] = {}


class Comm:
    """A rank's communicator."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank = ring, rank


def tensor_at(address: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory at an address as a tensor."""
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address.value)
    return torch.frombuffer(array, dtype=dtype, count=count)


class ThreadsNccl:
    """The library. `failing`: names of functions that report an error of NCCL."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._rings: dict[bytes, Ring] = {}
        self._lock = threading.Lock()
        self.failing: set[str] = set()
        self.aborted: list[int] = []
        """Ranks whose communicators were aborted."""

    def ncclGetRawVersion(self) -> int:
        return VERSION

    def ncclGetVersion(self) -> str:
        return "2.28.0"

    def ncclGetUniqueId(self) -> ncclUniqueId:
        made = ncclUniqueId()
        made.internal[0] = next(self._ids)
        return made

    def ncclCommInitRank(self, world: int, unique_id: ncclUniqueId, rank: int) -> Comm:
        self._check("ncclCommInitRank")
        with self._lock:
            ring = self._rings.setdefault(bytes(unique_id), Ring(world))
        return Comm(ring, rank)

    def ncclAllReduce(self, *args: Any) -> None:
        send, receive, count, dtype, _, comm, _ = args
        sent = self._collect("ncclAllReduce", comm, tensor_at(send, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count, DTYPES[dtype]).copy_(torch.stack(sent).sum(0))

    def ncclAllGather(self, *args: Any) -> None:
        send, receive, count, dtype, comm, _ = args
        sent = self._collect("ncclAllGather", comm, tensor_at(send, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count * len(sent), DTYPES[dtype]).copy_(torch.cat(sent))

    def ncclBroadcast(self, *args: Any) -> None:
        _, receive, count, dtype, root, comm, _ = args
        sent = self._collect("ncclBroadcast", comm, tensor_at(receive, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count, DTYPES[dtype]).copy_(sent[root])

    def ncclCommAbort(self, comm: Comm) -> None:
        self.aborted.append(comm.rank)
        comm.ring.barrier.abort()

    def _check(self, function: str) -> None:
        if function in self.failing:
            raise RuntimeError("NCCL error: remote process exited")

    def _collect(
        self, function: str, comm: Comm, tensor: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks; None if the communicator was aborted, as NCCL's kernels
        end without an error then.
        """
        self._check(function)
        comm.ring.sent[comm.rank] = tensor.clone()
        try:
            comm.ring.barrier.wait()
            sent = [comm.ring.sent[rank] for rank in sorted(comm.ring.sent)]
            comm.ring.barrier.wait()
        except threading.BrokenBarrierError:
            return None
        return sent


def install(monkeypatch: pytest.MonkeyPatch) -> ThreadsNccl:
    """Let vLLM's PyNcclCommunicator call the stand-in, for tensors of the CPU."""
    library = ThreadsNccl()
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(pynccl, "NCCLLibrary", lambda path: library)
    monkeypatch.setattr(pynccl, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    return library
