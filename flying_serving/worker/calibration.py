"""The durations of each lane's steps, measured at start. Policies use them until traffic shows
more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flying_serving.errors import LaneError
from flying_serving.memory.kv_groups import KVGroups
from flying_serving.parallelism import Parallelism
from flying_serving.predict.probes import ENOUGH_S, Probe, probes
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.made_up_steps import decode_steps, prefill_steps
from flying_serving.wire import CalibrationRow

REPETITIONS = 3
REPEATED_S = 2 * ENOUGH_S
"""A probe is not repeated after this total time."""


@dataclass(frozen=True)
class StepLimits:
    """The limits of one step of a lane: requests, tokens, tokens of one request, and the groups of
    its KV. `pools`: its requests have no outputs.
    """

    sequences: int
    tokens: int
    request_tokens: int
    groups: KVGroups
    pools: bool = False

    @classmethod
    def of(cls, config: Any, blocks: int, groups: KVGroups) -> StepLimits:
        """Return the limits of a lane with this VllmConfig and number of KV blocks."""
        scheduler = config.scheduler_config
        requests = groups.made_up_requests(scheduler.max_num_seqs, blocks - 1)
        longest = min(config.model_config.max_model_len, groups.room_tokens([], blocks - 1))
        pools = config.model_config.runner_type == "pooling"
        return cls(requests, scheduler.max_num_batched_tokens, longest, groups, pools)

    def probes(self) -> list[Probe]:
        """Return the probes, limited to sizes that one step can take. Requests without outputs do
        not decode, and their prompts may have to be computed whole.
        """
        # and the token that the step draws
        found = probes(self.sequences, self.tokens, self.request_tokens - 1)
        return [p for p in found if p.kind == (True, 0)] if self.pools else found


def steps_of(probe: Probe, groups: KVGroups) -> Iterator[Any]:
    """Yield REPETITIONS steps of a probe, in blocks of these groups, and one that ends the
    requests.
    """
    if probe.is_prefill:
        return prefill_steps(REPETITIONS, probe.tokens, probe.context_tokens, groups)
    return decode_steps(REPETITIONS, probe.tokens, max(probe.context_tokens, REPETITIONS), groups)


@torch.inference_mode()
def calibrate_lanes(lanes: Mapping[int, DeviceLane], blocks: int) -> list[CalibrationRow]:
    """Measure all lanes of a device, in each kind of steps that they make. `blocks`: KV blocks
    that have memory. Raises LaneError as `calibrate`.
    """
    together = lanes[max(lanes)].any_of
    measured: list[CalibrationRow] = []
    for size, lane in lanes.items():
        limits = StepLimits.of(lane.config, blocks, lane.kv.groups)
        for parallelism in lane.parallelisms:
            step = lane.pool if limits.pools else partial(lane.step, parallelism=parallelism)
            measured += calibrate(size, limits, step, together, parallelism)
    return measured


def calibrate(
    size: int,
    limits: StepLimits,
    run: Callable[[Any], Any],
    together: Callable[[bool], bool],
    parallelism: Parallelism = Parallelism.TENSOR,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CalibrationRow]:
    """Measure one lane, all engines at the same time: lane 1s share the machine, members of a group
    a step.

    `run` makes a step of this lane, from a SchedulerOutput, in which `parallelism` says what the
    members divide. `together` takes whether this engine
    wants to stop; it returns whether any does, on all of them at the same time. Returns the fastest
    step of each probe, because other work on the machine while servers start only makes steps
    longer.

    Raises:
        LaneError: if a step fails, as a request of that size would.
    """
    measured: list[CalibrationRow] = []
    together(False)
    ended: set[tuple[bool, int]] = set()
    for probe in limits.probes():
        if probe.kind in ended or not probe.measures(size, parallelism):
            continue
        took_s: list[float] = []
        enough = False
        *steps, end = steps_of(probe, limits.groups)
        for step in steps:
            if not enough:
                took_s.append(_timed(size, probe, run, step, clock))
                enough = together(sum(took_s) > REPEATED_S)
        _timed(size, probe, run, end, clock)
        fastest_s = min(took_s)
        contents = probe.tokens, probe.is_prefill, probe.context_tokens
        measured.append(CalibrationRow(size, fastest_s, *contents, parallelism))
        if together(fastest_s > ENOUGH_S):
            ended.add(probe.kind)
    return measured


def _timed(
    size: int, probe: Probe, run: Callable[[Any], Any], step: Any, clock: Callable[[], float]
) -> float:
    """Run a step of a probe. Returns its duration in seconds."""
    began = clock()
    try:
        run(step)
    except Exception as error:  # a model or its backend may raise anything
        what = "a prompt" if probe.is_prefill else "decoding requests"
        raise LaneError(
            f"group size {size}: a made-up step of {probe.tokens} tokens of {what} failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    return clock() - began
