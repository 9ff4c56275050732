"""Lanes over quantized weights answer what stock vLLM answers at that degree, in bfloat16.

A lane must be as near to stock of its degree as stock's own degrees are to one another, as in
`test_bfloat16.py`.
"""

from collections.abc import Iterator
from functools import cache
from math import sqrt

import pytest

from harness.live import FLAGS, Server
from tests.stock.record import BFLOAT16, Answers, recorded
from tests.stock.requests import FORCED

pytestmark = pytest.mark.server

CASES = ("llama-w4a16-bfloat16", "llama-int8-bfloat16", "llama-fp8-channel-bfloat16")
DEGREES = (1, 2)
MOST = 1.5
"""Of the difference between stock's degrees: it is that of two ways to round, and so is ours, by
chance.
"""
Logprobs = dict[str, list[float]]


@cache
def stock(case: str, degree: int) -> Answers:
    return recorded(case, degree)


class Quantized(Server):
    """A server of two engines with a quantized model."""

    def __init__(self, case: str) -> None:
        self.case = case
        base = [flag for flag in FLAGS if not flag.startswith("--dtype")]
        super().__init__(case.removesuffix(BFLOAT16), 2, "--dtype=bfloat16", base=base)


@pytest.fixture(scope="module", params=CASES)
def server(request: pytest.FixtureRequest) -> Iterator[Quantized]:
    with Quantized(request.param) as live:
        yield live


def forced(answers: Answers) -> Logprobs:
    """What is said of the tokens that requests are forced to emit; those sampled may differ."""
    return {request.name: answers[request.name]["logprobs"] for request in FORCED}


def ours(server: Quantized, degree: int) -> Logprobs:
    logprobs = {}
    for request in FORCED:
        sampling = request.sampling()
        extra = sampling.pop("extra_args") | {"tp_degree": degree}
        choice = server.complete(request.prompt, vllm_xargs=extra, **sampling)
        assert choice["token_ids"] == list(request.forced)
        logprobs[request.name] = choice["logprobs"]["token_logprobs"]
    return logprobs


def difference(left: Logprobs, right: Logprobs) -> float:
    """Root of the mean square."""
    pairs = [pair for name in left for pair in zip(left[name], right[name], strict=True)]
    return sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))


def test_every_degree_is_offered(server: Quantized) -> None:
    assert server.status()["group_sizes"] == list(DEGREES)


@pytest.mark.parametrize("degree", DEGREES)
def test_lane_is_as_near_to_stock_as_stock_is_to_itself(server: Quantized, degree: int) -> None:
    apart = difference(forced(stock(server.case, 1)), forced(stock(server.case, 2)))
    found = difference(ours(server, degree), forced(stock(server.case, degree)))
    assert found <= MOST * apart
    server.check()
