"""Additions to a workload: some requests more urgent, now and then a long prompt."""

from __future__ import annotations

import bisect

import numpy as np
from msgspec.structs import replace

from flying_serving.errors import WorkloadError
from flying_serving.workload.model import MAX_PRIORITY, Request, Workload


def with_priority(workload: Workload, share: float, priority: int = -1, *, seed: int | None = None) -> Workload:
    """Give each request this priority with probability `share`; lower is more urgent, as in vLLM."""
    if not 0 <= share <= 1:
        raise WorkloadError("priority_share", share, "a share from 0 to 1")
    if abs(priority) > MAX_PRIORITY:
        raise WorkloadError("priority", priority, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")
    draws = _rng(workload, seed, 4).random(len(workload.requests))
    return workload.having(
        replace(request, priority=priority) if draw < share else request
        for request, draw in zip(workload.requests, draws, strict=True)
    )


def with_long_prompts(
    workload: Workload, prompt_tokens: int, output_tokens: int, every_s: float = 60.0, *, seed: int | None = None
) -> Workload:
    """Add one long request in each `every_s` seconds, at a time drawn uniformly, in the phase of its neighbours.

    Requests are numbered anew, so that indices ascend.
    """
    if not every_s > 0:
        raise WorkloadError("long_every_s", every_s, "seconds, above 0")
    starts = np.arange(0.0, workload.duration_s, every_s)
    times = starts + _rng(workload, seed, 5).random(len(starts)) * every_s
    arrivals = [request.arrival_s for request in workload.requests]
    added = [
        Request(0, at, prompt_tokens, output_tokens, phase=_phase_at(workload, arrivals, at))
        for at in times.tolist()
        if at <= workload.duration_s
    ]
    merged = sorted([*workload.requests, *added], key=lambda request: request.arrival_s)
    return workload.having(replace(request, index=index) for index, request in enumerate(merged))


def _phase_at(workload: Workload, arrivals: list[float], at_s: float) -> str | None:
    """The phase of the last request before a time."""
    return workload.requests[max(0, bisect.bisect_right(arrivals, at_s) - 1)].phase


def _rng(workload: Workload, seed: int | None, stream: int) -> np.random.Generator:
    """Draws that no other part of the workload uses."""
    return np.random.default_rng([workload.seed if seed is None else seed, stream])
