"""Collectives over shared memory between the ranks of one group: CPU processes on one node."""

import contextlib
import fcntl
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np
import torch

from flying_serving.comm.mapped import reserve
from flying_serving.comm.parts import byte_parts
from flying_serving.comm.shm_kernels import HEADER_BYTES, LINE_BYTES, exchange, gather, sum_all
from flying_serving.comm.shm_ranks import GroupRanks
from flying_serving.comm.waits import WaitTime

# measured: through larger slots a large sum leaves the caches and takes twice the time
SLOT_BYTES = 1 << 20
# measured: from here on, and for more than two ranks, to share the summing is faster
SPLIT_BYTES = 128 << 10
YIELDS = 500  # sched_yield calls until a wait sleeps between its looks: some 0.3 ms
MAX_SLEEP_S = 0.001

# The types that the kernel sums, each by a zero of it. Narrower floats travel as float32 and are
# rounded once.
ZEROS: dict[torch.dtype, np.number[Any]] = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.int32: np.int32(0),
    torch.int64: np.int64(0),
}
WIDENED = (torch.bfloat16, torch.float16)


class ShmGroup:
    """One rank's end of a group that does collectives through one file in shared memory.

    All ranks make the same calls in the same order, with CPU tensors of the same shape and dtype. A
    file serves one group once: each rank attaches to it one time. A rank that leaves a collective
    early for any reason (deadline, lost rank, interrupt) aborts the group for all. Calls from
    several threads take turns.

    Every collective raises CollectiveTimeout if a rank has not come to it within `deadline_s`, by
    this process's own time (`waits.py`). It raises GroupBroken if the group is aborted or a rank
    that is waited for has exited or closed. Both name the ranks and where they are.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        world: int,
        *,
        slot_bytes: int = SLOT_BYTES,
        deadline_s: float = 60.0,
        names: Sequence[str] | None = None,
    ) -> None:
        """Attach as `rank` of `world` to the file at `path` (under /dev/shm), which the first rank
        creates.

        Larger tensors go in pieces of `slot_bytes`; the file takes 2 * world * slot_bytes, from the
        start. `names` are for errors.

        Raises:
            ValueError: if the file is not for such a group, or the rank was taken before.
            SharedMemoryFull: if there is no room for the file.
        """
        if not 0 <= rank < world < HEADER_BYTES // LINE_BYTES:
            raise ValueError(
                f"rank={rank}, world={world}: 0 <= rank < world < {HEADER_BYTES // LINE_BYTES}"
            )
        if slot_bytes < world or slot_bytes % LINE_BYTES:
            raise ValueError(
                f"slot_bytes={slot_bytes}: a multiple of {LINE_BYTES}, and a byte for each rank"
            )
        names = [f"rank {other}" for other in range(world)] if names is None else names
        if len(names) != world:
            raise ValueError(f"names={names}: one for each of {world} ranks")
        self.path, self._rank, self._world = path, rank, world
        self._slot_bytes = slot_bytes
        self._everyone = (0, world)
        self._sequence = 0
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            opened.callback(os.close, self._file)
            self._map = opened.enter_context(self._attach(names[rank]))
            words = opened.enter_context(memoryview(self._map)[:HEADER_BYTES].cast("q"))
            self._ranks = GroupRanks(self._file, words, rank, names, deadline_s)
            self._group = (addressof(c_char.from_buffer(self._map)), rank, world, slot_bytes)
            self._opened = opened.pop_all()

    def _attach(self, name: str) -> mmap.mmap:
        """Size and map the file, and take the rank's place in it."""
        size = HEADER_BYTES + 2 * self._world * self._slot_bytes
        fcntl.flock(self._file, fcntl.LOCK_EX)  # other ranks may be here too
        try:
            if os.fstat(self._file).st_size not in (0, size):
                raise ValueError(
                    f"{self.path} is not for {self._world} ranks with slots of "
                    f"{self._slot_bytes} bytes"
                )
            os.ftruncate(self._file, size)
            mapped = mmap.mmap(self._file, size)
            reserve(self._file, self.path, size)
            if not GroupRanks.attach(self._file, self._rank):
                raise ValueError(f"{self.path} was attached to as {name} before")
            return mapped
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place and return it: the same bits on every rank, summed in the
        order of the ranks.

        Any shape and strides; float64, float32, int64, int32, and bfloat16 and float16, which are
        summed in float32. Raises TypeError for other dtypes.
        """
        if x.dtype in WIDENED:
            return x.copy_(self.all_reduce(x.float()))
        zero = ZEROS.get(x.dtype)
        if zero is None:
            raise TypeError(f"all_reduce of {x.dtype}: {', '.join(map(str, (*ZEROS, *WIDENED)))}")
        if self._world == 1:
            return x
        whole = x.contiguous()
        address, numel, size = whole.data_ptr(), whole.numel(), zero.itemsize
        step = self._slot_bytes // size
        for start in range(0, numel, step):
            count = min(step, numel - start)
            split = self._world > 2 and count * size >= SPLIT_BYTES
            piece = (address + start * size, count, size, int(split))
            self._run("all_reduce", self._everyone, 2 if split else 1, sum_all, piece, zero)
        return x if whole is x else x.copy_(whole)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, of any dtype, concatenated along `dim` in the order of the
        ranks.
        """
        return self._concatenate("all_gather", x, dim, True)

    def gather(self, x: torch.Tensor, dst: int, dim: int = -1) -> torch.Tensor | None:
        """Return the result of `all_gather` on rank `dst`; None on the others, which do not wait
        for it.
        """
        return self._concatenate("gather", x, dim, self._is_me(dst))

    def _concatenate(
        self, operation: str, x: torch.Tensor, dim: int, receives: bool
    ) -> torch.Tensor | None:
        """Publish `x`; return the ranks' tensors concatenated along `dim` if this rank
        `receives`.
        """
        shape = list(x.shape)
        shape[dim] *= self._world  # IndexError if there is no such dimension
        whole = x.contiguous()
        target = x.new_empty(shape) if receives else None
        ranks, address = (self._everyone, target.data_ptr()) if target is not None else ((0, 0), 0)
        row_bytes = math.prod(x.shape[dim % x.dim() :]) * x.element_size()
        for start, nbytes in self._pieces(whole):
            sent = (whole.data_ptr() + start, nbytes)
            self._run(operation, ranks, 1, gather, sent, ranks, (address, start, nbytes, row_bytes))
        return target

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x`, of any dtype, with rank `src`'s tensor; return it. Rank `src` does not
        wait for the others.
        """
        sends = self._is_me(src)
        ranks = (0, 0) if sends else (src, src + 1)
        whole = x.contiguous()
        for start, nbytes in self._pieces(whole):
            address = whole.data_ptr() + start
            sent = (address, nbytes if sends else 0)
            self._run("broadcast", ranks, 1, gather, sent, ranks, (address, 0, nbytes, nbytes))
        return x if whole is x else x.copy_(whole)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which is of any dtype and has shape
        (world, ...). Part j of the result is of rank j.

        Raises ValueError if `x` has another number of parts.
        """
        received = x.new_empty(x.shape)
        source, target = byte_parts(x, self._world), byte_parts(received, self._world)
        nbytes = source.shape[1]
        step = self._slot_bytes // self._world
        for start in range(0, nbytes, step):
            sent, fetched = (
                (parts.data_ptr() + start, parts.stride(0)) for parts in (source, target)
            )
            piece = min(step, nbytes - start)
            self._run("all_to_all", self._everyone, 1, exchange, sent, fetched, piece)
        return received

    def barrier(self, deadline_s: float | None = None) -> None:
        """Return once every rank has called this. `deadline_s`: how long to wait, in place of the
        group's own.
        """
        usual_s = self._ranks.deadline_s
        if deadline_s is not None:
            self._ranks.deadline_s = deadline_s
        try:
            self._run("barrier", self._everyone, 1, gather, (0, 0), self._everyone, (0, 0, 0, 1))
        finally:
            self._ranks.deadline_s = usual_s

    def require_whole(self, *, goes_on: bool = False) -> None:
        """Do nothing: a collective is over when it returns, and has raised if a rank was lost."""

    def _is_me(self, rank: int) -> bool:
        """Return whether this is `rank`, which must be one of the group."""
        if not 0 <= rank < self._world:
            raise ValueError(f"rank {rank} is not in a group of {self._world}")
        return rank == self._rank

    def _pieces(self, x: torch.Tensor) -> list[tuple[int, int]]:
        """Return (start, size) in bytes of the pieces of `x` that fit into a slot."""
        step = self._slot_bytes
        return [(start, min(step, x.nbytes - start)) for start in range(0, x.nbytes, step)]

    def _run(
        self,
        operation: str,
        ranks: tuple[int, int],
        steps: int,
        kernel: Callable[..., bool],
        *args: object,
    ) -> None:
        """Run a kernel until it is done. It takes `steps` sequence numbers, and waits for ranks[0]
        to ranks[1] - 1.
        """
        with self._lock:
            if self._map.closed:
                raise ValueError(f"{operation} on a closed group")
            sequence = self._sequence + 1
            self._sequence += steps
            try:
                if kernel(self._group, sequence, YIELDS, *args):
                    return
                wait = WaitTime()
                wait.look(time.monotonic())
                while not kernel(self._group, sequence, 0, *args):
                    wait.look(time.monotonic())
                    self._ranks.check(
                        f"{operation} (sequence {sequence})", sequence, range(*ranks), wait.waited_s
                    )
                    time.sleep(min(wait.waited_s / 8, MAX_SLEEP_S))
            except BaseException:
                # this rank does not come back to it, so no rank can go on
                self._ranks.abort(self._rank)
                raise

    def close(self) -> None:
        """Leave the group, once a collective under way in another thread is over. A second call
        does nothing.
        """
        with self._lock:
            self._opened.close()
