"""The CUDA graphs of all lanes of a worker: captured at start, one lane after the other, and
compared with eager steps.

A wrong graph would be wrong in each decode step of its lane, without an error. So a lane with a
wrong graph is eager, or its server does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.batches import check_steps
from flying_serving.vllm_adapter.model_runner.graphs import Captured, are_asked, bytes_of_groups
from flying_serving.vllm_adapter.model_runner.runner import Runner
from flying_serving.vllm_adapter.model_runner.stages import Kind
from flying_serving.worker.compiled import allowed
from flying_serving.worker.lane import WorkerLane
from flying_serving.worker.selfcheck import Difference, compare, record

DECODES = 2
"""Decode steps that are compared: the second one reads the KV that the first one has written."""
COMPARED: Mapping[Kind, float] = {"logits": 1.0}
"""Stages that are compared, as TOKENS: no request may differ. A replayed graph calls no other of
the model's modules.
"""
_PADDED = 3
"""Requests of a step that fills its graph in part, as graphs are of powers of two."""


@dataclass(frozen=True)
class GraphLane:
    """A lane whose graphs are captured and checked.

    `step`: makes a step with the lane's group active. `together`: takes whether this member
    refuses; returns whether any member of the lane's group does. `most`: requests of a step, at
    most.
    """

    size: int
    runner: Runner
    step: Callable[[Any], Any]
    together: Callable[[bool], bool]
    most: int


class LaneGraphs:
    """The CUDA graphs of all lanes of a worker, if they are asked for. Groups may have none beside
    those of lane 1.

    `groups`: the lane of each group size. `say`: takes what has been done, in words.
    `eager_where_refused`: as `Deployment.eager_where_refused`.
    """

    def __init__(
        self,
        lane1: Runner,
        groups: Mapping[int, WorkerLane],
        communicators: CommunicatorPool,
        say: Callable[[str], None],
        *,
        eager_where_refused: bool = False,
    ) -> None:
        self._lane1 = lane1
        self._groups = groups
        self._capturing = {
            size: lane for size, lane in groups.items() if are_asked(lane.runner.config)
        }
        self._communicators = communicators
        self._say = say
        self._eager_where_refused = eager_where_refused
        self._are_asked = are_asked(lane1.config)

    def bytes_of_groups(self, lane1_bytes: int) -> int:
        """Return the bytes of the groups' graphs, at most, by vLLM's estimate for lane 1."""
        if not self._are_asked:
            return 0
        groups = [lane.runner.config for lane in self._capturing.values()]
        return bytes_of_groups(lane1_bytes, self._lane1.config, groups)

    def prepare(self) -> None:
        """Let each lane make its largest step before any lane captures graphs.

        vLLM's scratch memory then has its size. It must not move once a graph has its address, be
        it one of lane 1 alone.
        """
        for lane in self._groups.values() if self._are_asked else ():
            lane.warm_most()

    @torch.inference_mode()
    def capture(self, most: int) -> None:
        """Capture graphs in each group's lane, when vLLM has captured lane 1's. Compare the graphs
        of all lanes with eager steps of at most `most` requests.

        Raises:
            LaneError: if one differs, unless its lane is to be eager then.
        """
        if not self._are_asked:
            return
        for size, lane in self._capturing.items():
            self._say(summary(size, lane.capture()))
        self._check(1, self._lane1, self._lane1.step, most)
        for size, lane in self._capturing.items():
            self._check(size, lane.runner, lane.execute, most)

    @torch.inference_mode()
    def check_lane1(self, most: int) -> None:
        """Compare the graphs of lane 1 alone: groups have none in an engine that is started again.
        Raises LaneError as `capture`.
        """
        if self._are_asked:
            self._check(1, self._lane1, self._lane1.step, most)

    def _check(self, size: int, runner: Runner, step: Callable[[Any], Any], most: int) -> None:
        together = partial(self._communicators.any_of, size)
        try:
            largest = check_graphs(GraphLane(size, runner, step, together, most))
        except LaneError as error:
            if not self._eager_where_refused:
                raise LaneError(f"--cuda-graphs: {error}. Start with --no-cuda-graphs") from None
            runner.graphs.give_up()
            self._say(f"group of {size}: steps have no CUDA graphs: {error}")
            return
        most_share = allowed(runner.config.model_config.dtype)
        self._say(
            f"group of {size}: CUDA graphs equal eager steps within {largest:.1e} of their logits "
            f"({most_share:g} is allowed)"
        )


def summary(size: int, captured: Captured) -> str:
    """Return what the capture of a group's graphs took, in words."""
    least, most = min(captured.requests, default=0), max(captured.requests, default=0)
    return (
        f"group of {size}: {len(captured.requests)} CUDA graphs of {least} to {most} requests, "
        f"{captured.bytes / 2**20:.0f} MiB, {captured.took_s:.1f} s"
    )


def check_graphs(lane: GraphLane) -> float:
    """Compare decode steps that replay a graph with the same steps run eagerly.

    Returns the largest difference of the logits, as a share of them.

    Raises:
        LaneError: on every member of the group, if one of them finds a difference or has no graph.
    """
    counts = [count for count in _counts(lane) if lane.runner.graphs.replays(count)]
    differences = {count: _differences(lane, count) for count in counts}
    reason = refusal(lane, differences)
    if lane.together(reason is not None):
        raise LaneError(
            reason or f"group size {lane.size}: another member of the group refuses its CUDA graphs"
        )
    return max(one.share for of_count in differences.values() for one in of_count)


def refusal(lane: GraphLane, differences: dict[int, list[Difference]]) -> str | None:
    """Return why the graphs of a lane must not be used, or None; `differences`: by requests."""
    if not differences:
        return (
            f"no decode step of group size {lane.size} has a CUDA graph; the attention backend may "
            "have none"
        )
    # a padded step, and attention with other splits, round otherwise in each layer
    most = allowed(lane.runner.config.model_config.dtype)
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


def _counts(lane: GraphLane) -> list[int]:
    """Return the numbers of requests whose steps are compared: one, a padded one and the most."""
    most = min([lane.most, *lane.runner.graphs.requests[-1:]])
    return sorted({count for count in (1, _PADDED, most) if 0 < count <= lane.most})


def _differences(lane: GraphLane, requests: int) -> list[Difference]:
    config, model = lane.runner.config, lane.runner.model
    vocabulary = config.model_config.get_vocab_size()
    steps: Callable[[], Iterator[Any]] = partial(
        check_steps, requests, vocabulary, lane.runner.groups, DECODES
    )
    with lane.runner.graphs.unused():
        eager = record(model, lane.step, steps(), COMPARED)
    return compare(model, lane.step, steps(), eager, COMPARED)
