"""Lines that time steps: of lane 1 beside stock, with the sizes of an 8B model, and of groups."""

import statistics
import time
from typing import Any

from benchmarks import stamped
from benchmarks.cuda_check.asking import (
    APART,
    TOGETHER,
    ask,
    ask_at_once,
    drawn,
    require,
    token_parallel_steps,
)
from benchmarks.cuda_check.site import Site
from harness.live import Server

COMPILED_BAR, EAGER_BAR = 0.98, 0.95
"""Least share of stock's tokens per second.

Async scheduling hides the host's work behind a step of graphs. An eager step is the host's work,
and lane 1 of a server with groups has more of it: a copy of q, k, v in each layer, the generators'
states, and the engine's loop. That is some 0.25 ms of 9 to 12.
"""
ROUNDS = 5
STEPS = 96
HOST_STREAMS = (1, 8, 64)
PROMPTS_TOKENS = (2000, 8000)
OF_TWO = {"ours lanes", "ours compiled lanes"}
"""Servers of two engines, which are asked alone."""


def beside_stock(site: Site, ours: str, stock: str, streams: int, bar: float) -> str:
    """Compare the time of a decode step with stock's, in neighbouring pairs; the first is left out.

    Raises AssertionError if ours has less than `bar` of stock's tokens per second.
    """
    if ours in OF_TWO:
        site[ours].layout(APART)
    pairs = []
    for number in range(ROUNDS):
        names = (stock, ours)[:: 1 if number % 2 else -1]
        took_s = {name: step_s(site[name], streams) for name in names}
        pairs.append((took_s[stock], took_s[ours]))
    stock_s, ours_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    share = statistics.median(of_stock / of_ours for of_stock, of_ours in pairs[1:])
    figure = f"{1e3 * ours_s:.2f} ms a step, stock {1e3 * stock_s:.2f}: {share:.2f} of its tokens/s"
    require(share >= bar, figure)
    return figure


def of_a_group(site: Site, ours: str) -> str:
    """Time steps of a group of two. There is no bar: its collectives go by way of the host."""
    site[ours].layout(TOGETHER)
    figures = []
    for streams in (1, 16):
        step_s(site[ours], streams, degree=2)
        took_s = [step_s(site[ours], streams, degree=2) for _ in range(ROUNDS - 2)]
        figures.append(f"{1e3 * statistics.median(took_s):.2f} ms a step of {streams}")
    return ", ".join(figures)


def prompts_both_ways(site: Site) -> str:
    """Time the first token of a prompt in a group of two whose steps divide tokens and weights in
    turn. The first prompt of each way is left out.

    There is no bar: its collectives go by way of the host, and each way has others.
    """
    server = site["ours both ways, large"]
    server.layout(TOGETHER)
    return "; ".join(f"{tokens}: {_both_ways(server, tokens)}" for tokens in PROMPTS_TOKENS)


def _both_ways(server: Server, tokens: int) -> str:
    took_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * ROUNDS):
        before = token_parallel_steps(server)
        began_s = time.monotonic()
        ask(
            server,
            drawn(number, tokens),
            max_tokens=1,
            temperature=0.0,
            logprobs=None,
            vllm_xargs={"tp_degree": 2},
        )
        answered_s = time.monotonic()
        took_s[token_parallel_steps(server) != before].append(answered_s - began_s)
    return evaluate_ways(took_s)


def evaluate_ways(took_s: dict[bool, list[float]]) -> str:
    """Compare the times of prompts in steps that divided tokens (True) and weights.

    Raises:
        AssertionError: if one of the ways has less than two.
    """
    counts = f"{len(took_s[True])} prompts divided tokens, {len(took_s[False])} did not"
    require(min(map(len, took_s.values())) > 1, counts)
    token_s, tensor_s = (statistics.median(took_s[way][1:]) for way in (True, False))
    return (
        f"token parallel {1e3 * token_s:.1f} ms, tensor parallel {1e3 * tensor_s:.1f}: "
        f"{token_s / tensor_s:.2f}"
    )


def step_s(server: Server, streams: int, degree: int | None = None) -> float:
    """Return the time of a step that decodes one token of each stream.

    The time of requests of one token is taken off: a prompt is no part of a step. `degree`: None
    for any.
    """
    told: dict[str, Any] = {} if degree is None else {"vllm_xargs": {"tp_degree": degree}}
    took_s = []
    for count in (1, 1 + STEPS):
        requests = [
            {
                "prompt": drawn(number, 64),
                "max_tokens": count,
                "temperature": 0.0,
                "ignore_eos": True,
                "logprobs": None,
                **told,
            }
            for number in range(streams)
        ]
        began_s = time.monotonic()
        ask_at_once(server, requests)
        took_s.append(time.monotonic() - began_s)
    return (took_s[1] - took_s[0]) / STEPS


def between_steps(site: Site) -> str:
    """Return the time from a step's output to the launch of the next, on each of two engines.

    It is the time of a step in which the device has nothing to do: without async scheduling, and
    with steps of a tiny model. There is no bar.
    """
    server = site["ours stamped"]
    server.layout(TOGETHER)
    steps_ms = {streams: 1e3 * step_s(server, streams, degree=2) for streams in HOST_STREAMS}
    found = stamped.gaps_s(site.stamps)
    require(set(HOST_STREAMS) <= set(found), f"steps of {sorted(found)} requests have stamps")
    return "; ".join(
        f"{streams}: {_of(found[streams])}, a step {steps_ms[streams]:.2f} ms"
        for streams in HOST_STREAMS
    )


def _of(gaps_s: list[float]) -> str:
    tenth, *_ = statistics.quantiles(gaps_s, n=10)
    return f"median {1e3 * statistics.median(gaps_s):.2f} ms, 10th percentile {1e3 * tenth:.2f}"
