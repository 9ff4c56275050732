"""Cuts, scales and mixes workloads.

A request that is cut or scaled keeps its index, so the remaining part of its prompt stays the same.
"""

import bisect
import math

import numpy as np
from msgspec.structs import replace

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import MAX_PRIORITY, MAX_TOKENS, Request, Workload, blocks_of


def window(workload: Workload, start_s: float = 0.0, end_s: float = math.inf) -> Workload:
    """Return the requests that arrive in [start_s, end_s), with `start_s` as the new start.

    Raises:
        WorkloadError: if there is none.
    """
    if not 0 <= start_s < end_s:
        raise WorkloadError("window", (start_s, end_s), "0 <= start < end, in seconds")
    kept = [
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in workload.requests
        if start_s <= request.arrival_s < end_s
    ]
    if not kept:
        raise WorkloadError(
            "window", (start_s, end_s), f"arrivals lie between 0 and {workload.duration_s} s"
        )
    return workload.having(kept)


def with_after(workload: Workload, low_s: float, burst_s: float, after_s: float) -> Workload:
    """Name the phase of the first `after_s` of each low phase that follows a burst "after".

    `low_s`, `burst_s`: lengths of the phases, which come in turn, low first.
    """

    def labelled(request: Request) -> Request:
        cycle, in_cycle_s = divmod(request.arrival_s, low_s + burst_s)
        is_after = cycle > 0 and in_cycle_s < min(after_s, low_s)
        return replace(request, phase="after") if is_after else request

    return workload.having(map(labelled, workload.requests))


def first(workload: Workload, requests: int) -> Workload:
    """Return the first requests, or all if there are fewer."""
    if requests < 1:
        raise WorkloadError("requests", requests, "at least 1")
    return workload.having(workload.requests[:requests])


def scale_time(workload: Workload, factor: float) -> Workload:
    """Scale inter-arrival times by `factor`: 0.5 is twice the rate."""
    _check_factor("time_scale", factor)
    return workload.having(
        replace(request, arrival_s=request.arrival_s * factor) for request in workload.requests
    )


def scale_lengths(workload: Workload, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """Scale the lengths of prompts and outputs by `prompt` and `output`, to at least one token.

    The number of tokens of a hash id scales with `prompt`, rounded, so shared prefixes scale too. A
    prompt is no longer than its ids reach.
    """
    _check_factor("prompt_scale", prompt)
    _check_factor("output_scale", output)
    block_tokens = min(MAX_TOKENS, max(1, round(workload.block_tokens * prompt)))

    def scaled(request: Request) -> Request:
        tokens = min(MAX_TOKENS, max(1, round(request.prompt_tokens * prompt)))
        if request.hash_ids:
            tokens = min(tokens, len(request.hash_ids) * block_tokens)
        return _with_prompt(
            replace(
                request,
                output_tokens=min(MAX_TOKENS, max(1, round(request.output_tokens * output))),
            ),
            tokens,
            block_tokens,
        )

    return workload.having(map(scaled, workload.requests), block_tokens=block_tokens)


def clip(
    workload: Workload, prompt_tokens: int = MAX_TOKENS, output_tokens: int = MAX_TOKENS
) -> Workload:
    """Cut prompts and outputs to a maximum number of tokens."""
    if prompt_tokens < 1 or output_tokens < 1:
        raise WorkloadError("clip", (prompt_tokens, output_tokens), "at least 1 token")
    return workload.having(
        _with_prompt(
            replace(request, output_tokens=min(request.output_tokens, output_tokens)),
            min(request.prompt_tokens, prompt_tokens),
            workload.block_tokens,
        )
        for request in workload.requests
    )


def _with_prompt(request: Request, tokens: int, block_tokens: int) -> Request:
    """Return the request with a prompt of another length, and the hash ids that it keeps."""
    ids = request.hash_ids[: blocks_of(tokens, block_tokens)]
    return replace(request, prompt_tokens=tokens, hash_ids=ids)


def _check_factor(field: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise WorkloadError(field, factor, "a finite number above 0")


def with_priority(
    workload: Workload, share: float, priority: int = -1, *, seed: int | None = None
) -> Workload:
    """Give each request this priority with probability `share`; lower is more urgent, as in
    vLLM.
    """
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
    workload: Workload,
    prompt_tokens: int,
    output_tokens: int,
    every_s: float = 60.0,
    *,
    seed: int | None = None,
) -> Workload:
    """Add one long request in each `every_s` seconds, at a time drawn uniformly, in the phase of
    its neighbours.

    Requests are numbered anew, so that indices ascend.
    """
    if not every_s > 0:
        raise WorkloadError("long_every_s", every_s, "seconds, above 0")
    starts = np.arange(0.0, workload.duration_s, every_s)
    times = starts + _rng(workload, seed, 5).random(len(starts)) * every_s
    arrivals = [request.arrival_s for request in workload.requests]
    added = []
    for at in times[times <= workload.duration_s].tolist():
        before = workload.requests[max(0, bisect.bisect_right(arrivals, at) - 1)]
        added.append(Request(0, at, prompt_tokens, output_tokens, phase=before.phase))
    merged = sorted([*workload.requests, *added], key=lambda request: request.arrival_s)
    return workload.having(replace(request, index=index) for index, request in enumerate(merged))


def _rng(workload: Workload, seed: int | None, stream: int) -> np.random.Generator:
    """Return draws that no other part of the workload uses."""
    return np.random.default_rng([workload.seed if seed is None else seed, stream])
