"""Lines that time steps of lane 1 beside stock vLLM, of a model with the sizes of an 8B one."""

import statistics
import time

from benchmarks.cuda_check.asking import ask_at_once, drawn, require
from benchmarks.cuda_check.site import Site
from harness.live import Server

LEAST_OF_STOCK = 0.98
ROUNDS = 5
STEPS = 96


def beside_stock(site: Site, ours: str, stock: str, streams: int) -> str:
    """Compare the time of a decode step with stock's, in neighbouring pairs; the first is left out.

    Raises AssertionError if ours has less than LEAST_OF_STOCK of stock's tokens per second.
    """
    pairs = []
    for number in range(ROUNDS):
        names = (stock, ours)[:: 1 if number % 2 else -1]
        took_s = {name: step_s(site[name], streams) for name in names}
        pairs.append((took_s[stock], took_s[ours]))
    stock_s, ours_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    share = statistics.median(of_stock / of_ours for of_stock, of_ours in pairs[1:])
    figure = f"{1e3 * ours_s:.2f} ms a step, stock {1e3 * stock_s:.2f}: {share:.2f} of its tokens/s"
    require(share >= LEAST_OF_STOCK, figure)
    return figure


def step_s(server: Server, streams: int) -> float:
    """Return the time of a step that decodes one token of each stream.

    The time of requests of one token is taken off: a prompt is no part of a step.
    """
    took_s = []
    for count in (1, 1 + STEPS):
        requests = [
            {
                "prompt": drawn(number, 64),
                "max_tokens": count,
                "temperature": 0.0,
                "ignore_eos": True,
                "logprobs": None,
            }
            for number in range(streams)
        ]
        began_s = time.monotonic()
        ask_at_once(server, requests)
        took_s.append(time.monotonic() - began_s)
    return (took_s[1] - took_s[0]) / STEPS
