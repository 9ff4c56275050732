"""A group lends its weights to requests that no group holds else: all answers are stock's, before,
meanwhile, after.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from flying_serving.config import MODES
from harness.live import BLOCK_BYTES, Server, wait_until
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.answers import stock_answers
from tests.stock.requests import REQUESTS, StockRequest

pytestmark = pytest.mark.server

BLOCKS, BLOCK = 9, 32
"""An engine holds 256 tokens, a group of four 1,024, and with lent weights all that the model may
have.
"""
SHAPES = ("llama", "mixtral")
APART, PAIRS, TOGETHER = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
BY_NAME = {request.name: request for request in REQUESTS}
LONG = BY_NAME["forced-long"]
SHORT = [
    request
    for request in REQUESTS
    if len(request.prompt) + request.max_tokens <= (BLOCKS - 1) * BLOCK
]
STORM_ROUNDS = 40


class Lending(Server):
    """A server of four engines that lend their weights, and what stock vLLM answers with the same
    model.
    """

    def __init__(self, shape: str, *flags: str) -> None:
        memory = f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}"
        super().__init__(shape, 4, memory, "--lend-weights", *flags)
        self.recorded = stock_answers(shape)

    def ask(self, request: StockRequest, degree: int, **told: int) -> None:
        """A request is answered as stock does at this degree."""
        sampling = request.sampling()
        extra = (sampling.pop("extra_args") or {}) | told
        choice = self.complete(request.prompt, vllm_xargs=extra, **sampling)
        stock = self.recorded[str(degree)]["answers"][request.name]
        assert choice["token_ids"] == stock["tokens"], request.name
        assert (
            worst_difference(choice["logprobs"]["token_logprobs"], stock["logprobs"])
            <= WORST_LOGPROB
        ), request.name

    @property
    def stage(self) -> str:
        """Where the weights of the widest group are."""
        (stage,) = self.status()["weights"].values()
        return str(stage)


@pytest.fixture(scope="module", params=SHAPES)
def server(request: pytest.FixtureRequest) -> Iterator[Lending]:
    with Lending(request.param) as live:
        yield live


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def test_answers_are_stock_s_in_every_stage(server: Lending, threads: ThreadPoolExecutor) -> None:
    """At each degree, with all weights, without those that are lent, and when they are back, three
    times.
    """
    status = server.status()
    assert status["capacity_tokens"] == {"1": 256, "2": 512, "4": 1024}
    assert status["lent_capacity_tokens"] >= 2048
    for _ in range(3):
        server.layout(TOGETHER)
        assert server.stage == "whole"
        for answer in [threads.submit(server.ask, request, 4) for request in REQUESTS]:
            answer.result()
        assert server.stage == "lent"
        server.check()
        server.ask(LONG, 4)
        for layout, degree in ((PAIRS, 2), (APART, 1)):
            server.layout(layout)
            assert server.stage == "whole"
            for answer in [threads.submit(server.ask, request, degree) for request in SHORT]:
                answer.result()
        server.check()


def test_a_switch_waits_for_requests_that_need_the_room(
    server: Lending, threads: ThreadPoolExecutor
) -> None:
    """Others go on meanwhile, and no further long one begins; then weights come back, and engines
    are told.
    """
    server.layout(TOGETHER)
    long = threads.submit(server.ask, LONG, 4)
    wait_until(lambda: server.stage == "lent" or long.done())
    switch = threads.submit(server.layout, APART)
    short = [threads.submit(server.ask, BY_NAME["block"], 4) for _ in range(2)]
    long.result()
    record = switch.result()
    assert record["waited_for_idle_ms"] > 0
    for answer in short:
        answer.exception()  # it may have begun after the switch
    assert server.stage == "whole"
    server.ask(BY_NAME["block"], 1)
    server.check()


def test_a_request_of_lower_degree_has_weights_come_back(server: Lending) -> None:
    """It waits for them, without a change of the layout."""
    server.layout(TOGETHER)
    server.ask(LONG, 4)
    assert server.stage == "lent"
    server.ask(BY_NAME["chunks"], 2, tp_degree=2)
    server.ask(BY_NAME["block"], 1, tp_degree=1)
    assert server.stage == "whole"
    server.ask(LONG, 4)
    server.check()


def test_narrower_groups_hold_what_they_ever_did(server: Lending) -> None:
    answer = server.post([1] * 600, 10, 2)
    assert answer.status_code == 400
    assert "its KV cache holds 512 tokens" in answer.text


def test_weights_go_and_come_under_a_storm(server: Lending, threads: ThreadPoolExecutor) -> None:
    """Long and short requests, clients that leave, and layouts that change at any moment."""
    draw, answers = random.Random(27), list[Future[None]]()
    left = threading.Event()

    def leave() -> None:
        """A client does not wait for its answer."""
        body = {
            "model": server.model,
            "prompt": list(LONG.prompt),
            "max_tokens": 40,
            "ignore_eos": True,
        }
        try:
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=draw.uniform(0.05, 1.0))
        except httpx.TimeoutException:
            left.set()

    server.layout(APART)
    for number in range(STORM_ROUNDS):
        if number % 4 == 0:
            answers.append(threads.submit(server.ask, LONG, 4))
        if number % 5 == 0:
            threads.submit(leave)
        answers += [
            threads.submit(server.ask, BY_NAME["block"], 1) for _ in range(draw.randrange(3))
        ]
        order = {"groups": draw.choice([APART, PAIRS, TOGETHER]), "mode": draw.choice(MODES)}
        # an order whose client leaves while it waits is dropped
        with contextlib.suppress(httpx.TimeoutException):
            server.http.post("/flying/layout", json=order, timeout=draw.choice([0.2, 5.0]))
        server.check()
    server.layout(TOGETHER)
    for answer in answers:
        answer.result()
    assert left.is_set()
    server.layout(APART)
    server.until_idle()
    assert server.stage == "whole"
    server.check()
