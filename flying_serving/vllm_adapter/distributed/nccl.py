"""NCCL groups that can lose a member: vLLM's PyNcclCommunicator without a torch world."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import FileStore
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from flying_serving.comm.parts import byte_parts
from flying_serving.comm.waits import WaitTime
from flying_serving.comm.watchdog import Watchdog
from flying_serving.errors import CollectiveTimeout, GroupBroken, Unsupported
from flying_serving.layout.groups import Group

POLL_S = 0.01
T = TypeVar("T")


@dataclass(frozen=True)
class NcclMember:
    """A device as a member of groups that exchange by NCCL: where its tensors are, and how it meets
    the other members.

    It waits `deadline_s` for the others, at its first collective and in each step, by the `clock`.
    `watchdog` aborts its groups.
    """

    engine: int
    device: torch.device
    deadline_s: float
    watchdog: Watchdog
    clock: Callable[[], float] = time.monotonic

    def open_end(self, path: str, rank: int, group: Group, names: Sequence[str]) -> "NcclGroup":
        """Open this rank's end of a group. Does not wait for the other ranks."""
        end = NcclGroup(path, rank, names, self)
        others = [engine for engine in group if engine != self.engine]
        if others:  # an engine's own devices are lost together
            self.watchdog.watch(end, others)
        return end


class NcclGroup:
    """One rank's end of a group that exchanges by NCCL (a `GroupEnd`).

    The ranks meet through a file at their first collective, so that an engine which starts again
    waits for no other. A collective is queued on the current stream when it returns. If a member is
    lost or late, `abort` ends the collectives on the device, and their results are void
    (`require_whole`).
    """

    def __init__(self, path: str, rank: int, names: Sequence[str], member: NcclMember) -> None:
        self.path = path
        self._rank, self._names, self._member = rank, names, member
        self._state = threading.Lock()
        self._communicator: PyNcclCommunicator | None = None
        self._error: GroupBroken | None = None
        self._queued: WaitTime | None = None
        """How long the device may have waited in a collective that `require_whole` has not
        confirmed. The watchdog looks.
        """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place and return it."""

        def run(nccl: PyNcclCommunicator) -> torch.Tensor:
            whole = x.contiguous()
            nccl.all_reduce(whole, whole)
            return x if whole is x else x.copy_(whole)

        return self._run("all_reduce", run)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along `dim`."""

        def run(nccl: PyNcclCommunicator) -> torch.Tensor:
            gathered = x.new_empty((len(self._names), *x.shape))
            nccl.all_gather(gathered, x.contiguous())
            return torch.cat(gathered.unbind(), dim)

        return self._run("all_gather", run)

    def gather(self, x: torch.Tensor, dst: int, dim: int = -1) -> torch.Tensor | None:
        """Return the result of `all_gather` on rank `dst`; None on the others."""
        gathered = self.all_gather(x, dim)
        return gathered if self._rank == dst else None

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x` with rank `src`'s tensor; return it."""

        def run(nccl: PyNcclCommunicator) -> torch.Tensor:
            whole = x.contiguous()
            nccl.broadcast(whole, src)
            return x if whole is x else x.copy_(whole)

        return self._run("broadcast", run)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which has shape (world, ...)."""
        received = x.new_empty(x.shape)
        world = len(self._names)
        parts = list(zip(byte_parts(x, world), byte_parts(received, world), strict=True))

        def run(nccl: PyNcclCommunicator) -> torch.Tensor:
            nccl.group_start()
            try:
                for rank, (sent, fetched) in enumerate(parts):
                    nccl.send(sent, rank)
                    nccl.recv(fetched, rank)
            finally:
                nccl.group_end()  # also after an error: this thread's next calls would join it
            return received

        return self._run("all_to_all", run)

    def barrier(self, deadline_s: float) -> None:
        """Connect to the other ranks, within `deadline_s`."""
        self._connected(deadline_s)

    def require_whole(self, *, goes_on: bool = False) -> None:
        """Confirm the results of a step whose device work is over, with all its collectives.

        `goes_on`: True if collectives of a later step are queued. Their deadline begins now: the
        device comes to them after this step.

        Raises:
            CollectiveTimeout: if the group was aborted because a rank was late.
            GroupBroken: if it was aborted for another reason.
        """
        self._queued = self._begin_wait() if goes_on else None
        self._refuse_aborted()

    def overdue(self) -> str | None:
        """Return which ranks have been waited for longer than the deadline allows; None if none
        has.
        """
        queued = self._queued
        if queued is None:
            return None
        queued.look(self._member.clock())
        if queued.waited_s <= self._member.deadline_s:
            return None
        others = [name for rank, name in enumerate(self._names) if rank != self._rank]
        return f"waited {queued.waited_s:.1f} s for one of {', '.join(others)}"

    def abort(self, error: GroupBroken) -> None:
        """End the collectives under way on the device. Any thread may call it; the first error
        stays.
        """
        with self._state:
            if self._error is not None:
                return
            self._error = error
            communicator = self._communicator
        if communicator is not None:
            communicator.destroy()

    def close(self) -> None:
        """Leave the group. A second call does nothing."""
        self._member.watchdog.forget(self)
        self.abort(GroupBroken("closed"))

    def _refuse_aborted(self) -> None:
        if self._error is not None:
            raise type(self._error)(f"group {Path(self.path).name}: {self._error}")

    def _run(self, operation: str, run: Callable[[PyNcclCommunicator], T]) -> T:
        """Queue a collective. Raises GroupBroken if the group was aborted, or NCCL has an error."""
        communicator = self._connected(self._member.deadline_s)
        if self._queued is None:
            self._queued = self._begin_wait()
        try:
            result = run(communicator)
        except RuntimeError as error:
            self._refuse_aborted()
            raise GroupBroken(f"{operation} of {Path(self.path).name}: {error}") from error
        self._refuse_aborted()
        return result

    def _connected(self, deadline_s: float) -> PyNcclCommunicator:
        self._refuse_aborted()
        if self._communicator is None:
            communicator = self._connect(deadline_s)
            with self._state:
                self._communicator = communicator
                aborted = self._error is not None
            if aborted:
                communicator.destroy()
            self._refuse_aborted()
        assert self._communicator is not None
        return self._communicator

    def _connect(self, deadline_s: float) -> PyNcclCommunicator:
        store = FileStore(self.path, len(self._names))
        store.set_timeout(timedelta(seconds=deadline_s))
        self._await_ranks(store, deadline_s)
        group = StatelessProcessGroup(self._rank, len(self._names), store)
        try:
            communicator = PyNcclCommunicator(group, self._member.device)
        except RuntimeError as error:
            self._refuse_aborted()
            raise GroupBroken(f"connecting {Path(self.path).name}: {error}") from error
        if not communicator.available:
            raise Unsupported("--cuda-collectives=pynccl: vLLM cannot load NCCL on this machine")
        return communicator

    def _await_ranks(self, store: FileStore, deadline_s: float) -> None:
        """Wait for all ranks. Raises CollectiveTimeout, or GroupBroken if one is lost meanwhile."""
        store.set(f"here/{self._rank}", "")
        wait = self._begin_wait()
        while missing := [
            name for rank, name in enumerate(self._names) if not store.check([f"here/{rank}"])
        ]:
            self._refuse_aborted()
            wait.look(self._member.clock())
            if wait.waited_s >= deadline_s:
                raise CollectiveTimeout(
                    f"connecting {Path(self.path).name}: waited {wait.waited_s:.1f} s for "
                    f"{', '.join(missing)}"
                )
            time.sleep(POLL_S)

    def _begin_wait(self) -> WaitTime:
        """Return a wait that begins now."""
        wait = WaitTime()
        wait.look(self._member.clock())
        return wait
