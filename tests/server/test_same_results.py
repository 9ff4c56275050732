"""Every lane answers what stock vLLM answers at that tensor-parallel size: tokens and logprobs, after other episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flying_serving.demo.tiny import make_model
from tests.live import ROOT, Server
from tests.stock.requests import FORCED, REQUESTS, SAMPLED, StockRequest

pytestmark = pytest.mark.server

SHAPES = ("llama", "qwen2", "qwen3", "mixtral", "llama-mqa")
DEGREES = (1, 2, 4)
WORST_LOGPROB = 1e-4


@pytest.fixture(scope="module", params=SHAPES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    shape = request.param
    with Server(make_model(ROOT / ".models" / shape, shape), 4) as live:
        live.recorded = json.loads((Path(__file__).parents[1] / "stock" / f"{shape}.json").read_text())  # type: ignore[attr-defined]
        yield live


def run(server: Server, request: StockRequest, degree: int) -> tuple[list[int], list[float]]:
    sampling = request.sampling()
    extra = {**(sampling.pop("extra_args") or {}), "tp_degree": degree}
    choice = server.complete(request.prompt, vllm_xargs=extra, **sampling)
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def compare(server: Any, request: StockRequest, degree: int, answer: tuple[list[int], list[float]]) -> None:
    stock = server.recorded["degrees"][str(degree)]["answers"][request.name]
    tokens, logprobs = answer
    assert tokens == stock["tokens"], f"{request.name} at degree {degree}"
    worst = max(abs(a - b) for a, b in zip(logprobs, stock["logprobs"], strict=True))
    assert worst <= WORST_LOGPROB, f"{request.name} at degree {degree}: logprobs differ by {worst}"


def test_each_degree_alone_and_after_the_others(server: Server) -> None:
    for degree in (2, 1, 4, 2, 1):
        for request in REQUESTS:
            compare(server, request, degree, run(server, request, degree))
    server.check()


def test_all_degrees_at_once_while_the_layout_changes(server: Server) -> None:
    jobs = [(request, degree) for request in (*SAMPLED, *FORCED) for degree in DEGREES]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(run, server, request, degree) for request, degree in jobs]
        for groups, preempt in (
            ([[0, 1], [2, 3]], "weave"),
            ([[0, 1, 2, 3]], "hard"),
            ([[0], [1], [2, 3]], "hard"),
            ([[0], [1], [2], [3]], "weave"),
        ):
            server.layout(groups, preempt)
        for (request, degree), answer in zip(jobs, answers, strict=True):
            compare(server, request, degree, answer.result())
    server.check()
