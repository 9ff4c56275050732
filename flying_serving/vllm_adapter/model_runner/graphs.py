"""CUDA graphs of a lane's decode steps: vLLM's FULL_DECODE_ONLY. A compiled lane 1 may have those
of other steps too, FULL_AND_PIECEWISE.

vLLM keeps the graphs of all runners of a process in one pool of memory. That is right where lanes
step one after the other. It has not run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.worker import workspace

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.versions import ModelRunner


@dataclass(frozen=True)
class Captured:
    """What a capture took. `requests`: the decoding requests of each graph, in rising order."""

    requests: tuple[int, ...]
    bytes: int
    took_s: float


def are_asked(config: VllmConfig) -> bool:
    """Return whether the lanes of this configuration capture their decode steps."""
    mode = config.compilation_config.cudagraph_mode
    decodes_apart = mode is not None and mode.separate_routine()
    return decodes_apart and mode.decode_mode() == CUDAGraphMode.FULL


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


def capture_nothing(config: VllmConfig) -> None:
    """Let a lane run without CUDA graphs, as vLLM does for its own mode NONE."""
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.max_cudagraph_capture_size = 0


def bytes_of_groups(lane1_bytes: int, lane1: VllmConfig, groups: Sequence[VllmConfig]) -> int:
    """Return how many bytes the graphs of groups take, at most, by vLLM's estimate for lane 1's.

    A group's step computes no more than lane 1's, and the lanes' graphs share one pool of memory.
    The V2 runner keeps the outputs of its largest graph beside the pool, for each lane.
    """
    of_lane1 = _captures(lane1)
    if not of_lane1:
        return 0
    return sum(
        lane1_bytes * _captures(group) // of_lane1 + _output_bytes(group) for group in groups
    )


def _captures(config: VllmConfig) -> int:
    """Return how many graphs a lane captures."""
    return len(_captured_sizes(config))


def _captured_sizes(config: VllmConfig) -> list[int]:
    """Return the sizes that a lane captures: no step has more requests than the scheduler's."""
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    return [size for size in sizes if size <= config.scheduler_config.max_num_seqs]


def _output_bytes(config: VllmConfig) -> int:
    """Return the bytes of the outputs that a lane's runner keeps for its graphs."""
    if not config.use_v2_model_runner:
        return 0
    model = config.model_config
    row_bytes = model.get_hidden_size() * model.dtype.itemsize
    return int(max(_captured_sizes(config), default=0) * row_bytes)


class DecodeGraphs:
    """The graphs of one lane. `runner`: vLLM's, V1 or V2, whose KV memory is bound. `version`: its
    adapter.
    """

    def __init__(self, runner: Any, version: ModelRunner, config: VllmConfig) -> None:
        self._runner = runner
        self._version = version
        self._config = config

    @property
    def requests(self) -> tuple[int, ...]:
        """The numbers of decoding requests for which there is a graph, or will be."""
        return tuple(sorted(self._version.graph_sizes()))

    def replays(self, requests: int) -> bool:
        """Return whether a step that decodes one token of each of some requests replays a graph."""
        return self._version.graph_mode(requests) == CUDAGraphMode.FULL

    @contextmanager
    def unused(self) -> Iterator[None]:
        """While the body runs, every step is eager."""
        before = self._version.use_graphs(False)
        try:
            yield
        finally:
            self._version.use_graphs(before)

    def give_up(self) -> None:
        """From now on, let every step be eager."""
        self._version.use_graphs(False)

    def capture(self) -> Captured:
        """Capture the graphs of a group's lane, all members in lockstep, with their group active.

        Lane 1's are captured already, by vLLM. vLLM's scratch memory must not move meanwhile, as
        the graphs of other lanes hold its addresses.

        Raises:
            LaneError: if it moved.
        """
        began_s = time.monotonic()
        self._version.wrap_for_capture(self._config)
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
            "graphs of other lanes hold its address; start with --no-cuda-graphs"
        )


def _places() -> dict[int, tuple[int, int]]:
    """Return address and bytes of each part of vLLM's scratch memory that there is, by number."""
    parts = workspace.current_workspace_manager()._current_workspaces
    return {
        number: (part.data_ptr(), part.nbytes)
        for number, part in enumerate(parts)
        if part is not None
    }
