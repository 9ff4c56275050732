"""Requests with drafts by n-grams, in one server: the answers and counts of stock vLLM at every
degree, through switches of the layout in every mode and the loss of an engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from flying_serving.config import MODES
from harness import drafts_cpu
from harness.live import FLAGS, Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.drafted import (
    CONFIG,
    COUNTERS,
    FLAG,
    PROMPTS,
    REQUESTS,
    DraftedRequest,
    recorded_counts,
)
from tests.stock.record import Answers, recorded
from tests.stock.served import Served

pytestmark = [pytest.mark.server, pytest.mark.cpu_only("speculation is served on the CPU alone")]

DEGREES = (1, 2)
APART, TOGETHER = [[0], [1]], [[0, 1]]
BACK_S = 90.0
MOST_DRAFTS: int = CONFIG["num_speculative_tokens"]
STOCK_FLAGS = (
    *(f for f in FLAGS if not f.startswith(("--policy", "--logits", "--max-num-batched"))),
    "--max-num-batched-tokens=2048",  # above all prompts together: see tests/stock/requests.py
    FLAG,
)
A_TO_H = list(range(97, 105))
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {"allowed_token_ids": A_TO_H},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "top_k, top_p": {"top_k": 9, "top_p": 0.8},
    "temperature": {"temperature": 0.4},
    "repetition_penalty": {"repetition_penalty": 1.9, "allowed_token_ids": A_TO_H},
    "presence_penalty": {"presence_penalty": 1.9, "allowed_token_ids": A_TO_H},
    "frequency_penalty": {"frequency_penalty": 1.5, "allowed_token_ids": A_TO_H},
    "bad_words": {"bad_words": ["b", "ac", "hh"], "allowed_token_ids": A_TO_H},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(256)), "ignore_eos": False},
    "logprobs": {"logprobs": 3},
    "n": {"n": 2},
}
WITH_PARAMETERS = {
    f"{prompt}: {name}": {
        "prompt": list(PROMPTS[prompt]),
        "temperature": 1.0,
        "seed": 54,
        "max_tokens": 32,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **fields,
    }
    for prompt in ("short", "loop")
    for name, fields in PARAMETERS.items()
}
"""Alone, a request of the short prompt makes steps in which there are no drafts."""
MIGRATED = ("flying:kv_pulled_requests", "flying:kv_prefilled_again_requests")
REGEX = "([ab]{3}[ab01]{2}-)+"
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    base = [flag for flag in FLAGS if not flag.startswith("--logits-processors")]
    with Server("llama", 2, FLAG, base=base) as live:
        yield live


@pytest.fixture(scope="module")
def stock() -> dict[int, Answers]:
    return {degree: recorded("llama-ngram", degree) for degree in DEGREES}


def run(server: Server, request: DraftedRequest, **told: int) -> Answer:
    choice = server.complete(request.prompt, vllm_xargs=told, **request.sampling())
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def answers_to(server: Server, body: dict[str, Any], **told: int) -> list[Answer]:
    """Return the answer of each choice."""
    asked = {"model": server.model, **body, **({"vllm_xargs": told} if told else {})}
    choices = server.http.post("/v1/completions", json=asked).raise_for_status().json()["choices"]
    return [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in choices]


OF_STOCK = Served(
    "speculation",
    "llama",
    STOCK_FLAGS,
    WITH_PARAMETERS,
    lambda stock: {name: answers_to(stock, body) for name, body in WITH_PARAMETERS.items()},
    drafts_cpu.ENVIRONMENT,
)


def compare(stock: Answers, request: DraftedRequest, answer: Answer) -> None:
    tokens, logprobs = answer
    assert tokens == stock[request.name]["tokens"], request.name
    worst = worst_difference(logprobs, stock[request.name]["logprobs"])
    assert worst <= WORST_LOGPROB, f"{request.name}: logprobs differ by {worst}"


def run_all(
    server: Server, stock: Answers, requests: Sequence[DraftedRequest] = REQUESTS, **told: int
) -> None:
    """Run requests together, and compare their answers."""
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(run, server, request, **told) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            compare(stock, request, answer.result())


@dataclass(frozen=True)
class Counted:
    """`made`: of COUNTERS. `migrated`: requests that went on in another group."""

    made: list[int]
    migrated: int

    def since(self, before: Counted) -> Counted:
        made = [after - count for after, count in zip(self.made, before.made, strict=True)]
        return Counted(made, self.migrated - before.migrated)

    def check(self, expected: list[int]) -> None:
        """A step is made again if its tokens had not arrived when its request went on."""
        again = [made - count for made, count in zip(self.made, expected, strict=True)]
        steps, drafts, accepted = again
        assert 0 <= steps <= self.migrated, (self, expected)
        assert 0 <= accepted <= drafts <= MOST_DRAFTS * steps, (self, expected)


def counts(server: Server) -> Counted:
    def of(name: str) -> int:
        return int(sum(server.metric(f"{name}_total").values()))

    return Counted([of(name) for name in COUNTERS], sum(of(name) for name in MIGRATED))


def test_recorded_drafts_are_accepted_and_rejected() -> None:
    """What follows would show little otherwise."""
    for degree in DEGREES:
        steps, drafts, accepted = recorded_counts(degree)
        assert steps > 100
        assert 0.1 * drafts < accepted < 0.9 * drafts


@pytest.mark.parametrize("degree", DEGREES[::-1])
def test_each_degree_gives_the_answers_and_counts_of_stock(
    server: Server, stock: dict[int, Answers], degree: int
) -> None:
    before = counts(server)
    run_all(server, stock[degree], tp_degree=degree)
    assert counts(server).since(before).made == recorded_counts(degree)
    server.check()


@pytest.mark.parametrize("degree", DEGREES)
def test_parameters_of_sampling_are_stocks_with_and_without_drafts(
    server: Server, degree: int
) -> None:
    """One request after the other, then all together."""
    stock, losses = OF_STOCK.answers(), server.metric("flying:engine_losses_total")
    alone = {
        name: answers_to(server, body, tp_degree=degree) for name, body in WITH_PARAMETERS.items()
    }
    with ThreadPoolExecutor(len(WITH_PARAMETERS)) as pool:
        asked = {
            name: pool.submit(answers_to, server, body, tp_degree=degree)
            for name, body in WITH_PARAMETERS.items()
        }
        together = {name: answer.result() for name, answer in asked.items()}
    for found, name in itertools.product((alone, together), WITH_PARAMETERS):
        for (tokens, logprobs), expected in zip(found[name], stock[name], strict=True):
            assert tokens == expected[0], name
            assert worst_difference(logprobs, expected[1]) <= WORST_LOGPROB, name
    assert server.metric("flying:engine_losses_total") == losses
    server.check()


def test_switches_in_all_modes_change_no_answer_and_no_count(
    server: Server, stock: dict[int, Answers]
) -> None:
    """Whole steps are made wherever a request goes, and each has the drafts that it had. A step
    that is made twice is counted twice.
    """
    before, asked = counts(server), list[tuple[DraftedRequest, Future[Answer]]]()
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        for mode, groups in itertools.product(MODES, (TOGETHER, APART)):
            if all(answer.done() for _, answer in asked):
                asked += [(request, pool.submit(run, server, request)) for request in REQUESTS]
            server.layout(groups, mode)
        for request, answer in asked:
            compare(stock[1], request, answer.result())
    times = len(asked) // len(REQUESTS)
    counts(server).since(before).check([times * count for count in recorded_counts(1)])
    assert {switch["mode"] for switch in server.switches()} == set(MODES)
    server.check()


def test_drafts_keep_to_a_grammar_wherever_a_request_goes(server: Server) -> None:
    """A grammar shortens drafts. The answers are those of requests that stay where they are."""

    def ask(seed: int | None) -> str:
        drawn = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
        fields = {"structured_outputs": {"regex": REGEX}, "max_tokens": 40, "ignore_eos": True}
        text: str = server.complete(range(40, 70), **fields, **drawn)["text"]
        return text

    seeds = (None, 5, 6)
    server.layout(APART)
    with ThreadPoolExecutor(len(seeds)) as pool:
        before = counts(server)
        undisturbed = [answer.result() for answer in [pool.submit(ask, seed) for seed in seeds]]
        between = counts(server)
        answers = [pool.submit(ask, seed) for seed in seeds]
        for groups in (TOGETHER, APART) * 3:
            server.layout(groups, "migrate")
        assert [answer.result() for answer in answers] == undisturbed
    first = between.since(before)
    assert first.migrated == 0
    counts(server).since(between).check(first.made)
    assert first.made[2] > 0
    assert all(re.match(REGEX, text) for text in undisturbed)


def test_requests_that_two_engines_share(server: Server, stock: dict[int, Answers]) -> None:
    """The first one hands over in the middle of the prompt, or of the answer."""
    server.layout(APART)
    long = [request for request in REQUESTS if len(request.prompt) > 100]
    run_all(server, stock[1], long, split_at=len(long[0].prompt) // 2)
    run_all(server, stock[1], long, split_at=len(long[0].prompt) + 25)
    server.check()


def test_loss_of_an_engine_changes_no_answer(server: Server, stock: dict[int, Answers]) -> None:
    server.layout(TOGETHER)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = [pool.submit(run, server, request, tp_degree=2) for request in REQUESTS]
        wait_until(lambda: server.requests("running") > 1, server.status)
        kill(server, 1)
        for request, answer in zip(REQUESTS, answers, strict=True):
            compare(stock[2], request, answer.result())
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    server.check()
