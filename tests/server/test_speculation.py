"""Requests with drafts by n-grams, in one server: the answers and counts of stock vLLM at every
degree, through switches of the layout in every mode and the loss of an engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from flying_serving.config import MODES
from harness.live import FLAGS, Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.drafted import CONFIG, COUNTERS, FLAG, REQUESTS, DraftedRequest, recorded_counts
from tests.stock.record import Answers, recorded

pytestmark = [pytest.mark.server, pytest.mark.cpu_only("speculation is served on the CPU alone")]

DEGREES = (1, 2)
APART, TOGETHER = [[0], [1]], [[0, 1]]
BACK_S = 90.0
MOST_DRAFTS: int = CONFIG["num_speculative_tokens"]
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
