"""A stand-in for the NCCL library, behind the methods of vLLM's NCCLLibrary that PyNcclCommunicator
calls.

Ranks are threads of one process. As in NCCL, a collective waits for all ranks without a deadline,
until its communicator is aborted.
"""

import ctypes
import itertools
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum, ncclUniqueId

T = TypeVar("T")
VERSION = 22800
DTYPES = {
    number: dtype
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    for number in [ncclDataTypeEnum.from_torch(dtype)]
}


class Ring:
    """The ranks of one unique id."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.sent: dict[int, Any] = {}


class Comm:
    """A rank's communicator."""

    def __init__(self, ring: Ring, rank: int) -> None:
        self.ring, self.rank = ring, rank


@dataclass
class Calls:
    """Sends and receives that a thread has grouped, by peer: all of one communicator."""

    comm: Comm | None = None
    sends: dict[int, torch.Tensor] = field(default_factory=dict)
    receives: dict[int, torch.Tensor] = field(default_factory=dict)


def tensor_at(address: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory at an address as a tensor."""
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address.value)
    return torch.frombuffer(array, dtype=dtype, count=count)


def copy_at(address: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of the memory at an address."""
    return tensor_at(address, count, dtype).clone()


class ThreadsNccl:
    """The library. `failing`: names of functions that report an error of NCCL."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._rings: dict[bytes, Ring] = {}
        self._lock = threading.Lock()
        self._group = threading.local()
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
        sent = self._collect("ncclAllReduce", comm, copy_at(send, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count, DTYPES[dtype]).copy_(torch.stack(sent).sum(0))

    def ncclAllGather(self, *args: Any) -> None:
        send, receive, count, dtype, comm, _ = args
        sent = self._collect("ncclAllGather", comm, copy_at(send, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count * len(sent), DTYPES[dtype]).copy_(torch.cat(sent))

    def ncclBroadcast(self, *args: Any) -> None:
        _, receive, count, dtype, root, comm, _ = args
        sent = self._collect("ncclBroadcast", comm, copy_at(receive, count, DTYPES[dtype]))
        if sent is not None:
            tensor_at(receive, count, DTYPES[dtype]).copy_(sent[root])

    @property
    def group_is_open(self) -> bool:
        """Whether this thread has begun a group of calls and not ended it."""
        return self._calls is not None

    @property
    def _calls(self) -> Calls | None:
        """Return the calls of this thread's group; None if it has begun none."""
        return getattr(self._group, "calls", None)

    def ncclGroupStart(self) -> None:
        assert self._calls is None
        self._group.calls = Calls()

    def ncclSend(self, *args: Any) -> None:
        self._check("ncclSend")
        send, count, dtype, peer, comm, _ = args
        self._in_group(comm).sends[peer] = copy_at(send, count, DTYPES[dtype])

    def ncclRecv(self, *args: Any) -> None:
        receive, count, dtype, peer, comm, _ = args
        self._in_group(comm).receives[peer] = tensor_at(receive, count, DTYPES[dtype])

    def _in_group(self, comm: Comm) -> Calls:
        """Return the calls of this thread's group: alone, a send waits for its receiver."""
        assert self._calls is not None, "ranks that all send first wait for each other"
        self._calls.comm = comm
        return self._calls

    def ncclGroupEnd(self) -> None:
        calls, self._group.calls = self._calls, None
        assert calls is not None
        if calls.comm is None:
            return
        sent = self._collect("ncclGroupEnd", calls.comm, calls.sends)
        if sent is not None:
            for peer, receive in calls.receives.items():
                receive.copy_(sent[peer][calls.comm.rank])

    def ncclCommAbort(self, comm: Comm) -> None:
        self.aborted.append(comm.rank)
        comm.ring.barrier.abort()

    def _check(self, function: str) -> None:
        if function in self.failing:
            raise RuntimeError("NCCL error: remote process exited")

    def _collect(self, function: str, comm: Comm, sent: T) -> list[T] | None:
        """Return what all ranks sent; None if the communicator was aborted, as NCCL's kernels end
        without an error then.
        """
        self._check(function)
        comm.ring.sent[comm.rank] = sent
        try:
            comm.ring.barrier.wait()
            of_all = [comm.ring.sent[rank] for rank in sorted(comm.ring.sent)]
            comm.ring.barrier.wait()
        except threading.BrokenBarrierError:
            return None
        return of_all


def install(monkeypatch: pytest.MonkeyPatch) -> ThreadsNccl:
    """Let vLLM's PyNcclCommunicator call the stand-in, for tensors of the CPU."""
    library = ThreadsNccl()
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(pynccl, "NCCLLibrary", lambda path: library)
    monkeypatch.setattr(pynccl, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    return library
