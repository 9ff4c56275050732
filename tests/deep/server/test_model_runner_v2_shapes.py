"""Routed experts, lent weights and bfloat16 on vLLM's V2 model runner (Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from harness import triton_cpu
from harness.forked import ENVIRONMENT
from harness.live import BLOCK_BYTES, COMMAND, FLAGS, Server, wait_until
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.server.test_bfloat16 import MOST, difference, stock
from tests.stock.record import V2_TOKENS, recorded
from tests.stock.requests import FORCED, REQUESTS, StockRequest, shortened

pytestmark = pytest.mark.server

DEGREES = (1, 2)
BLOCKS, BLOCK = 9, 32
"""An engine holds 256 tokens, both together 512, and more with lent weights."""
APART, TOGETHER = [[0], [1]], [[0, 1]]
JOBS = {request.name: shortened(request, V2_TOKENS) for request in REQUESTS}
SHORT = [JOBS[name] for name in ("short", "block", "forced-short")]
LONG = JOBS["long"]
FORCE = "tests.stock.force_v2:ForceTokens"


class V2Server(Server):
    """A server of two engines on the V2 runner, for a tiny model of this shape."""

    def __init__(self, shape: str, *flags: str, dtype: str = "float32") -> None:
        base = [flag for flag in FLAGS if not flag.startswith(("--logits-processors=", "--dtype"))]
        base += [f"--dtype={dtype}", f"--logits-processors={FORCE}"]
        environment = ENVIRONMENT | triton_cpu.ENVIRONMENT
        super().__init__(shape, 2, *flags, base=base, program=COMMAND, environment=environment)

    def ask(self, request: StockRequest, degree: int) -> dict[str, Any]:
        sampling = request.sampling()
        extra = (sampling.pop("extra_args") or {}) | {"tp_degree": degree}
        return self.complete(request.prompt, vllm_xargs=extra, **sampling)

    def compare(self, requests: list[StockRequest], degree: int) -> None:
        """Requests at once get the answers of stock with the V2 runner."""
        with ThreadPoolExecutor(len(requests)) as pool:
            choices = list(pool.map(lambda request: self.ask(request, degree), requests))
        for request, choice in zip(requests, choices, strict=True):
            is_stocks(request, degree, choice)

    @property
    def stage(self) -> str:
        """Where the weights of both engines are."""
        (stage,) = self.status()["weights"].values()
        return str(stage)


def is_stocks(request: StockRequest, degree: int, choice: dict[str, Any]) -> None:
    """An answer begins as stock's."""
    answer = recorded("mixtral-v2", degree)[request.name]
    assert len(choice["token_ids"]) == request.max_tokens
    assert choice["token_ids"][:V2_TOKENS] == answer["tokens"], request.name
    logprobs = choice["logprobs"]["token_logprobs"][:V2_TOKENS]
    worst = worst_difference(logprobs, answer["logprobs"])
    assert worst <= WORST_LOGPROB, f"{request.name}: {worst}"


@pytest.fixture(scope="module")
def mixtral() -> Iterator[V2Server]:
    memory = f"--kv-cache-memory-bytes={BLOCKS * BLOCK_BYTES}"
    with V2Server("mixtral", memory, "--lend-weights") as live:
        assert "Using V2 Model Runner" in live.log()
        yield live


@pytest.mark.parametrize(("degree", "groups"), [(1, APART), (2, TOGETHER)])
def test_routed_experts_get_the_answers_of_stock(
    mixtral: V2Server, degree: int, groups: list[list[int]]
) -> None:
    mixtral.layout(groups)
    mixtral.compare(SHORT, degree)
    assert mixtral.stage == "whole"
    mixtral.check()


def test_answers_are_stocks_while_weights_are_lent_and_when_they_are_back(
    mixtral: V2Server,
) -> None:
    mixtral.layout(TOGETHER)
    mixtral.compare([LONG, *SHORT], 2)
    assert mixtral.stage == "lent"
    mixtral.compare(SHORT, 2)
    mixtral.layout(APART)
    assert mixtral.stage == "whole"
    mixtral.compare(SHORT, 1)
    mixtral.check()


def test_answers_are_stocks_though_weights_come_back_meanwhile(mixtral: V2Server) -> None:
    """The order waits for the long request, which needs the room; the others go on."""
    mixtral.layout(TOGETHER)
    jobs = [LONG, *(replace(JOBS[name], max_tokens=80) for name in ("short", "block"))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(mixtral.ask, request, 2) for request in jobs]
        wait_until(lambda: mixtral.stage == "lent" or answers[0].done(), mixtral.log)
        mixtral.layout(APART)
        assert mixtral.stage == "whole"
        for request, answer in zip(jobs, answers, strict=True):
            is_stocks(request, 2, answer.result())
    mixtral.check()


def test_bfloat16_is_as_near_to_stock_as_stock_is_to_itself() -> None:
    """The tokens are forced: samples may differ after rounding. Stock's logprobs of such tokens are
    no other with V2.
    """
    requests = [shortened(request, V2_TOKENS) for request in FORCED]
    scores = {
        degree: {name: logprobs[:V2_TOKENS] for name, logprobs in stock(degree).items()}
        for degree in DEGREES
    }
    apart = difference(scores[1], scores[2])
    with V2Server("llama", dtype="bfloat16") as server:
        for degree in DEGREES:
            server.layout(TOGETHER if degree == 2 else APART)
            choices = {request.name: server.ask(request, degree) for request in requests}
            ours = {name: one["logprobs"]["token_logprobs"] for name, one in choices.items()}
            assert difference(ours, scores[degree]) <= MOST * apart, f"degree {degree}"
        server.check()
