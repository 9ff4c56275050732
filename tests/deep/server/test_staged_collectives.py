"""A server whose groups exchange by way of a buffer in host memory, as on a shared GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from harness.live import Server, wait_until
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.answers import stock_answers
from tests.stock.requests import REQUESTS

pytestmark = pytest.mark.server

BACK_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, "--cpu-collectives=staged", "--engines-per-device=2") as live:
        yield live


def require_stock_answers(server: Server, degree: int) -> None:
    """Compare tokens and logprobs of all recorded requests with stock vLLM's at a degree."""
    for request in REQUESTS:
        sampling = request.sampling()
        extra = (sampling.pop("extra_args") or {}) | {"tp_degree": degree}
        choice = server.complete(request.prompt, vllm_xargs=extra, **sampling)
        stock = stock_answers("llama")[str(degree)]["answers"][request.name]
        assert choice["token_ids"] == stock["tokens"], f"{request.name} at degree {degree}"
        logprobs = choice["logprobs"]["token_logprobs"]
        worst = worst_difference(logprobs, stock["logprobs"])
        assert worst <= WORST_LOGPROB, f"{request.name} at degree {degree}: differs by {worst}"


def engines(server: Server) -> dict[int, int]:
    """Return the process of each engine that is there."""
    return {engine["engine"]: engine["pid"] for engine in server.status()["engines"]}


@pytest.mark.parametrize("degree", [2, 1])
def test_staged_server_answers_as_stock(server: Server, degree: int) -> None:
    require_stock_answers(server, degree)
    server.check()


@pytest.mark.cpu_only("it is of the CPU's log")
def test_setting_for_a_shared_gpu_says_that_it_changes_nothing(server: Server) -> None:
    assert "--engines-per-device=2: changes nothing on the CPU" in server.log()


def test_group_of_a_lost_engine_answers_as_stock_when_it_is_back(server: Server) -> None:
    lost = engines(server)[1]
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: engines(server).get(1) not in (None, lost), server.log, BACK_S)
    require_stock_answers(server, 2)
    server.check()
