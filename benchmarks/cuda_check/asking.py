"""The requests of the check, and what it asks servers."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.live import Server

LAYOUTS = {
    1: [[0], [1], [2], [3]],
    2: [[0, 1], [2, 3]],
    4: [[0, 1, 2, 3]],
}
APART, TOGETHER = [[0], [1]], [[0, 1]]
"""The layouts of two engines."""
TOKENS = 24
TOLERANCE = 1e-3
"""By how much logprobs of float32 may differ from stock's: sums of parts have another order."""


def drawn(seed: int, count: int) -> list[int]:
    """Return random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, 250) for _ in range(count)]


PROMPTS = [drawn(number, 20 + 37 * number) for number in range(4)]


def ask(server: Server, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return one answer of TOKENS tokens, with logprobs of the sampled ones."""
    return server.complete(prompt, **{"max_tokens": TOKENS, "logprobs": 0, **fields})


def ask_at_once(server: Server, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to requests that run together. Each has the fields of `ask`."""
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(ask, server, **request) for request in requests]
        return [answer.result() for answer in asked]


def logprobs(answer: dict[str, Any]) -> list[float]:
    """Return the logprob of each token of an answer."""
    found: list[float] = answer["logprobs"]["token_logprobs"]
    return found


def difference(answer: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return by how much logprobs differ, up to the first token that is another."""
    worst = 0.0
    ours, stocks = (zip(of["token_ids"], logprobs(of), strict=True) for of in (answer, expected))
    for (token, logprob), (stock_token, stock_logprob) in zip(ours, stocks, strict=False):
        if token != stock_token:
            break
        worst = max(worst, abs(logprob - stock_logprob))
    return worst


def token_parallel_steps(server: Server) -> dict[int, int]:
    """Return how many steps of groups have divided tokens, by group size."""
    counts = server.metric("flying:token_parallel_steps_total", "group_size")
    return {int(size): int(count) for (size,), count in counts.items()}


def require(true: bool, what: str) -> None:
    """Raise AssertionError with `what` unless `true`, also under `python -O`."""
    if not true:
        raise AssertionError(what)
