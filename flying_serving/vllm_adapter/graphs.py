"""CUDA graphs of a lane's decode steps, without compilation: vLLM's FULL_DECODE_ONLY.

vLLM keeps the graphs of all runners of a process in one pool of memory. That is right where lanes
step one after the other. It has not run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.worker import workspace

from flying_serving.errors import LaneError


@dataclass(frozen=True)
class Captured:
    """What a capture took. `requests`: the decoding requests of each graph, in rising order."""

    requests: tuple[int, ...]
    bytes: int
    took_s: float


def are_asked(config: VllmConfig) -> bool:
    """Return whether the lanes of this configuration capture their decode steps."""
    compilation = config.compilation_config
    is_compiled = compilation.mode not in (None, CompilationMode.NONE)
    return compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY and not is_compiled


def group_capture_sizes(own: Sequence[int]) -> list[int]:
    """Return the numbers of requests for which a group captures a graph, of those of lane 1: powers
    of two, and the largest.

    Each graph of each lane takes time at the start and memory.
    """
    largest = max(own, default=0)
    return sorted(size for size in set(own) if size & (size - 1) == 0 or size == largest)


def limit_capture_sizes(config: VllmConfig) -> None:
    """Let a group's lane capture fewer sizes than lane 1, of whose configuration it has a copy."""
    compilation = config.compilation_config
    if are_asked(config) and compilation.cudagraph_capture_sizes:
        compilation.cudagraph_capture_sizes = group_capture_sizes(
            compilation.cudagraph_capture_sizes
        )


def bytes_of_groups(lane1_bytes: int, lane1: VllmConfig, groups: Sequence[VllmConfig]) -> int:
    """Return how many bytes the graphs of groups take, at most, by vLLM's estimate for lane 1's.

    A group's step computes no more than lane 1's, and the lanes' graphs share one pool of memory.
    """
    of_lane1 = _captures(lane1)
    return sum(lane1_bytes * _captures(group) // of_lane1 for group in groups) if of_lane1 else 0


def _captures(config: VllmConfig) -> int:
    """Return how many graphs a lane captures: no step has more requests than the scheduler's."""
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    return sum(size <= config.scheduler_config.max_num_seqs for size in sizes)


def unwrapped(model: Any) -> Any:
    """Return a runner's model without the wrapper that captures its graphs."""
    return model.unwrap() if isinstance(model, CUDAGraphWrapper) else model


class DecodeGraphs:
    """The graphs of one lane. `runner`: vLLM's GPUModelRunner, whose KV memory is bound."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        self._runner = runner
        self._config = config

    @property
    def requests(self) -> tuple[int, ...]:
        """The numbers of decoding requests for which there is a graph, or will be."""
        of_modes = self._runner.cudagraph_dispatcher.get_capture_descs()
        return tuple(sorted({step.num_tokens for _, steps in of_modes for step in steps}))

    def replays(self, requests: int) -> bool:
        """Return whether a step that decodes one token of each of some requests replays a graph."""
        dispatcher = self._runner.cudagraph_dispatcher
        mode, _ = dispatcher.dispatch(num_tokens=requests, uniform_decode=True)
        return bool(mode == CUDAGraphMode.FULL)

    @contextmanager
    def unused(self) -> Iterator[None]:
        """While the body runs, every step is eager."""
        dispatcher = self._runner.cudagraph_dispatcher
        before, dispatcher.keys_initialized = dispatcher.keys_initialized, False
        try:
            yield
        finally:
            dispatcher.keys_initialized = before

    def capture(self) -> Captured:
        """Capture the graphs of a group's lane, all members in lockstep, with their group active.

        Lane 1's are captured already, by vLLM. vLLM's scratch memory must not move meanwhile, as
        the graphs of other lanes hold its addresses.

        Raises:
            LaneError: if it moved.
        """
        began_s = time.monotonic()
        if not isinstance(self._runner.model, CUDAGraphWrapper):
            self._runner.model = CUDAGraphWrapper(
                self._runner.model, self._config, CUDAGraphMode.FULL
            )
        with _steady_workspace(), set_current_vllm_config(self._config):
            size_bytes = self._runner.capture_model()
        return Captured(self.requests, int(size_bytes), time.monotonic() - began_s)


@contextmanager
def _steady_workspace() -> Iterator[None]:
    """While the body runs, vLLM's scratch memory may get new parts, as for a lane's own kernels.

    The body locks it again. Raises LaneError if a part has another address afterwards.
    """
    if not workspace.is_workspace_manager_initialized():
        yield
        return
    before = _places()
    workspace.unlock_workspace()
    yield
    after = _places()
    if any(after.get(part) != place for part, place in before.items()):
        raise LaneError(
            "--cuda-graphs: vLLM's scratch memory grew while a group captured its graphs, and "
            "graphs of other lanes hold its address; start without --cuda-graphs"
        )


def _places() -> dict[int, tuple[int, int]]:
    """Return address and bytes of each part of vLLM's scratch memory that there is, by number."""
    parts = workspace.current_workspace_manager()._current_workspaces
    return {
        number: (part.data_ptr(), part.nbytes)
        for number, part in enumerate(parts)
        if part is not None
    }
