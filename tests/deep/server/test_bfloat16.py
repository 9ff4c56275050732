"""In bfloat16 every lane is as near to stock vLLM of its degree as stock's own degrees are to one
another.
"""

from collections.abc import Iterator
from functools import cache
from math import sqrt

import pytest

from harness.live import FLAGS, Server
from tests.stock.record import MODELS, recorded
from tests.stock.requests import FORCED

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("it compares with stock at degree 2, which needs two GPUs"),
]

DEGREES = (1, 2, 4)
MOST = 1.5
"""Of the difference between stock's degrees 1 and 2: it is that of two ways to round, and so is
ours, by chance.
"""
Logprobs = dict[str, list[float]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = [flag for flag in FLAGS if not flag.startswith("--dtype")]
    with Server("llama", 4, "--dtype=bfloat16", base=flags) as live:
        yield live


@cache
def stock(degree: int) -> Logprobs:
    """What stock gives the tokens that requests are forced to emit; what they sample may differ
    after rounding.
    """
    answers = recorded("llama-bfloat16", degree, MODELS)
    return {request.name: answers[request.name]["logprobs"] for request in FORCED}


def ours(server: Server, degree: int) -> Logprobs:
    found = {}
    for request in FORCED:
        sampling = request.sampling()
        extra = sampling.pop("extra_args") | {"tp_degree": degree}
        choice = server.complete(request.prompt, vllm_xargs=extra, **sampling)
        assert choice["token_ids"] == list(request.forced)
        found[request.name] = choice["logprobs"]["token_logprobs"]
    return found


def difference(left: Logprobs, right: Logprobs) -> float:
    """Root of the mean square."""
    pairs = [pair for name in left for pair in zip(left[name], right[name], strict=True)]
    return sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))


@pytest.mark.parametrize("degree", DEGREES)
def test_a_lane_is_as_near_to_stock_as_stock_is_to_itself(server: Server, degree: int) -> None:
    apart = difference(stock(1), stock(2))
    assert difference(ours(server, degree), stock(degree)) <= MOST * apart
    server.check()
