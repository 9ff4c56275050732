"""A model whose layers have recurrent state beside attention: it answers what stock vLLM answers,
at every degree, while requests go from group to group with their state, and when an engine is lost.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from flying_serving.config import MODES
from harness.live import FLAGS, Server, wait_until
from harness.losing import is_whole, kill
from harness.streams import WORST_LOGPROB, worst_difference
from tests.deep.server.test_same_results import migrations
from tests.stock.served import Served

pytestmark = pytest.mark.server

SHAPE, ENGINES = "falcon-h1", 4
STOCK_FLAGS = (
    *(flag for flag in FLAGS if not flag.startswith("--policy")),
    "--no-enable-prefix-caching",  # its kernel for the CPU cannot keep states of a prefix
)
PAIRS, ALL, APART = [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]
LAYOUTS = (PAIRS, ALL, APART)
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(500) for _ in range(length)] for length in (5, 60, 100, 200)]
TOKENS = 96
BETWEEN_S = 0.2
BACK_S = 90.0
Answer = tuple[list[int], list[float]]


def ask(server: Server, number: int, **told: Any) -> Answer:
    """One seeded stream of the prompt of this number."""
    choice = server.complete(
        PROMPTS[number], max_tokens=TOKENS, seed=number, temperature=1.0, ignore_eos=True, **told
    )
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def ask_all(server: Server) -> list[Answer]:
    return [ask(server, number) for number in range(len(PROMPTS))]


OF_STOCK = Served("recurrent_state", SHAPE, STOCK_FLAGS, [PROMPTS, TOKENS], ask_all)
"""What stock vLLM answers on one device."""


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    answers: list[Answer] = OF_STOCK.answers()
    return answers


@pytest.fixture(scope="module")
def server(expected: list[Answer]) -> Iterator[Server]:
    with Server(SHAPE, ENGINES) as live:
        yield live


def compare(found: list[Future[Answer]], expected: list[Answer]) -> None:
    for answer, stock in zip(found, expected, strict=True):
        tokens, logprobs = answer.result()
        assert tokens == stock[0]
        assert worst_difference(logprobs, stock[1]) <= WORST_LOGPROB


def test_the_log_says_that_no_prefix_is_cached(server: Server) -> None:
    assert "--no-enable-prefix-caching: set" in server.log()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_each_degree_answers_as_stock(server: Server, expected: list[Answer], degree: int) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        told = {"vllm_xargs": {"tp_degree": degree}}
        numbers = range(len(PROMPTS))
        compare([pool.submit(ask, server, number, **told) for number in numbers], expected)
    server.check()


@pytest.mark.parametrize("mode", MODES)
def test_streams_over_switches_answer_as_stock(
    server: Server, expected: list[Answer], mode: str
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(ask, server, number) for number in range(len(PROMPTS))]
        for groups in itertools.cycle(LAYOUTS):
            server.layout(groups, mode)
            time.sleep(BETWEEN_S)
            if all(answer.done() for answer in asked):
                break
        compare(asked, expected)
    server.check()


def test_states_migrate_with_their_requests(server: Server, expected: list[Answer]) -> None:
    server.layout(APART)
    before = migrations(server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(ask, server, number) for number in range(len(PROMPTS))]
        wait_until(lambda: server.requests("running") == len(PROMPTS), server.status)
        server.layout(ALL, "migrate")
        compare(asked, expected)
    after = migrations(server)
    assert after["migrated"] - before["migrated"] == len(PROMPTS)
    assert after["prefilled_again"] == before["prefilled_again"]


def test_loss_of_an_engine_changes_no_answer(server: Server, expected: list[Answer]) -> None:
    server.layout(PAIRS)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(ask, server, number) for number in range(len(PROMPTS))]
        wait_until(lambda: server.requests("running") == len(PROMPTS), server.status)
        kill(server, 1)
        compare(asked, expected)
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    server.check()
