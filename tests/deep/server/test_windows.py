"""A model whose every layer has a window: lanes keep all KV, and answer what stock vLLM answers,
which drops it.
"""

import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.live import FLAGS, Server
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.served import Served

pytestmark = pytest.mark.server

ENGINES = 4
WINDOW = 64
WINDOWED = f"--hf-overrides={json.dumps({'sliding_window': WINDOW})}"
STOCK_FLAGS = (*(flag for flag in FLAGS if not flag.startswith("--policy")), WINDOWED)
LAYOUTS = ([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]])
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(500) for _ in range(length)] for length in (5, 60, 100, 300)]
SHORT, LONG = 16, 200
Answer = tuple[list[int], list[float]]


def answer(server: Server, prompt: list[int], max_tokens: int, **told: Any) -> Answer:
    choice = server.complete(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **told
    )
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def answer_all(server: Server) -> list[list[Answer]]:
    """Return the answers to all prompts, first SHORT ones, then LONG ones."""
    return [[answer(server, prompt, tokens) for prompt in PROMPTS] for tokens in (SHORT, LONG)]


OF_STOCK = Served("windows", "mixtral", STOCK_FLAGS, [PROMPTS, SHORT, LONG], answer_all)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Answer]]:
    """What stock vLLM answers on one device, by the number of tokens."""
    return dict(zip((SHORT, LONG), OF_STOCK.answers(), strict=True))


@pytest.fixture(scope="module")
def server(expected: dict[int, list[Answer]]) -> Iterator[Server]:
    with Server("mixtral", ENGINES, WINDOWED) as live:
        yield live


def compare(found: Answer, stock: Answer) -> None:
    assert found[0] == stock[0]
    assert worst_difference(found[1], stock[1]) <= WORST_LOGPROB


def test_the_log_says_that_all_kv_is_kept(server: Server) -> None:
    assert "every layer has a window; KV of all tokens is kept" in server.log()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_each_degree_answers_as_stock(
    server: Server, expected: dict[int, list[Answer]], degree: int
) -> None:
    for prompt, stock in zip(PROMPTS, expected[SHORT], strict=True):
        compare(answer(server, prompt, SHORT, vllm_xargs={"tp_degree": degree}), stock)


def test_requests_that_migrate_answer_as_stock(
    server: Server, expected: dict[int, list[Answer]]
) -> None:
    """Their KV moves to wider and narrower groups, far beyond the window."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(answer, server, prompt, LONG) for prompt in PROMPTS]
        for groups in itertools.cycle(LAYOUTS):
            server.layout(groups, "migrate")
            if all(pending.done() for pending in answers):
                break
        for pending, stock in zip(answers, expected[LONG], strict=True):
            compare(pending.result(), stock)
    engines = server.status()["engines"]
    assert sum(engine["migrations"]["migrated"] for engine in engines) > 0
    server.check()
