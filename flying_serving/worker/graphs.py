"""The CUDA graphs of all lanes of a worker: captured at start, one lane after the other, and
compared with eager steps.

A wrong graph would be wrong in each decode step of its lane, without an error. So a lane with a
wrong graph is eager, or its server does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.graphs import Captured, are_asked, bytes_of_groups
from flying_serving.vllm_adapter.model_runner.made_up_steps import check_steps
from flying_serving.worker.compiled import COMPARED, allowed
from flying_serving.worker.selfcheck import Difference, compare, record

DECODES = 2
"""Decode steps that are compared: the second one reads the KV that the first one has written."""
_PADDED = 3
"""Requests of a step that fills its graph in part, as graphs are of powers of two."""


class LaneGraphs:
    """The CUDA graphs of all lanes of a worker, if they are asked for. Groups may have none beside
    those of lane 1.

    `lanes`: of the device, lane 1 first. `say`: takes what has been done, in words.
    `eager_where_refused`: as `Deployment.eager_where_refused`.
    """

    def __init__(
        self,
        lanes: Iterable[DeviceLane],
        say: Callable[[str], None],
        *,
        eager_where_refused: bool = False,
    ) -> None:
        self._lane1, *self._others = lanes
        self._capturing = [lane for lane in self._others if are_asked(lane.config)]
        self._say = say
        self._eager_where_refused = eager_where_refused
        self._are_asked = are_asked(self._lane1.config)

    def bytes_of_groups(self, lane1_bytes: int) -> int:
        """Return the bytes of the groups' graphs, at most, by vLLM's estimate for lane 1."""
        if not self._are_asked:
            return 0
        groups = [lane.config for lane in self._capturing]
        return bytes_of_groups(lane1_bytes, self._lane1.config, groups)

    def prepare(self) -> None:
        """Let each lane make its largest step before any lane captures graphs.

        vLLM's scratch memory then has its size. It must not move once a graph has its address, be
        it one of lane 1 alone.
        """
        for lane in self._others if self._are_asked else ():
            lane.warm(lane.config.scheduler_config.max_num_batched_tokens)

    @torch.inference_mode()
    def capture(self, most: int) -> None:
        """Capture graphs in each group's lane, when vLLM has captured lane 1's. Compare the graphs
        of all lanes with eager steps of at most `most` requests.

        Raises:
            LaneError: if one differs, unless its lane is to be eager then.
        """
        if not self._are_asked:
            return
        for lane in self._capturing:
            self._say(summary(lane.size, lane.capture()))
        for lane in (self._lane1, *self._capturing):
            self._check(lane, most)

    @torch.inference_mode()
    def check_lane1(self, most: int) -> None:
        """Compare the graphs of lane 1 alone: groups have none in an engine that is started again.
        Raises LaneError as `capture`.
        """
        if self._are_asked:
            self._check(self._lane1, most)

    def _check(self, lane: DeviceLane, most: int) -> None:
        try:
            largest = check_graphs(lane, most)
        except LaneError as error:
            if not self._eager_where_refused:
                raise LaneError(f"--cuda-graphs: {error}. Start with --no-cuda-graphs") from None
            lane.graphs.give_up()
            self._say(f"group of {lane.size}: steps have no CUDA graphs: {error}")
            return
        most_share = allowed(lane.config.model_config.dtype)
        self._say(
            f"group of {lane.size}: CUDA graphs equal eager steps within {largest:.1e} of their "
            f"logits ({most_share:g} is allowed)"
        )


def summary(size: int, captured: Captured) -> str:
    """Return what the capture of a group's graphs took, in words."""
    least, most = min(captured.requests, default=0), max(captured.requests, default=0)
    return (
        f"group of {size}: {len(captured.requests)} CUDA graphs of {least} to {most} requests, "
        f"{captured.bytes / 2**20:.0f} MiB, {captured.took_s:.1f} s"
    )


def check_graphs(lane: DeviceLane, most: int) -> float:
    """Compare decode steps of at most `most` requests that replay a graph with the same steps run
    eagerly.

    Returns the largest difference of the logits, as a share of them.

    Raises:
        LaneError: on every member of the group, if one of them finds a difference or has no graph.
    """
    counts = [count for count in _counts(lane, most) if lane.graphs.replays(count)]
    differences = {count: _differences(lane, count) for count in counts}
    reason = refusal(lane, differences)
    if lane.any_of(reason is not None):
        raise LaneError(
            reason or f"group size {lane.size}: another member of the group refuses its CUDA graphs"
        )
    return max(one.share for of_count in differences.values() for one in of_count)


def refusal(lane: DeviceLane, differences: dict[int, list[Difference]]) -> str | None:
    """Return why the graphs of a lane must not be used, or None; `differences`: by requests."""
    if not differences:
        return (
            f"no decode step of group size {lane.size} has a CUDA graph; the attention backend may "
            "have none"
        )
    # a padded step, and attention with other splits, round otherwise in each layer
    most = allowed(lane.config.model_config.dtype)
    for count, of_count in differences.items():
        if not of_count:
            return f"group size {lane.size}: no logits could be compared"
        largest = max(one.share for one in of_count)
        if not largest <= most:
            return (
                f"group size {lane.size}: a step of {count} decoding requests differs from an "
                f"eager one by {largest:.2g} of its logits ({most:g} is allowed); please report "
                "this model"
            )
    return None


def _counts(lane: DeviceLane, most: int) -> list[int]:
    """Return the numbers of requests whose steps are compared: one, a padded one and the most."""
    largest = min([most, *lane.graphs.requests[-1:]])
    return sorted({count for count in (1, _PADDED, largest) if 0 < count <= most})


def _differences(lane: DeviceLane, requests: int) -> list[Difference]:
    vocabulary = lane.config.model_config.get_vocab_size()
    steps: Callable[[], Iterator[Any]] = partial(
        check_steps, requests, vocabulary, lane.kv.groups, DECODES
    )
    with lane.graphs.unused():
        eager = record(lane.model, lane.step, steps(), COMPARED)
    return compare(lane.model, lane.step, steps(), eager, COMPARED)
