"""Requests without a seed: no two groups draw alike, none repeats what was drawn before, and lane 1
draws as stock.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.live import Server, wait_until
from harness.losing import is_whole, kill
from tests.stock.served import Served

pytestmark = pytest.mark.server

APART, PAIRS = [[0], [1], [2], [3]], [[0, 1], [2, 3]]
PROMPT = [3, 1, 4, 1, 5]
DRAWN: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
STOCK_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--kv-cache-memory-bytes=67108864",
)
BACK_S = 90.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 4) as live:
        yield live


def draw(server: Server, at_once: int) -> list[tuple[int, ...]]:
    """Sample from the same prompt without a seed, as often at once; with as many groups each gets
    one.
    """
    with ThreadPoolExecutor(at_once) as pool:
        answers = [pool.submit(server.complete, PROMPT, **DRAWN) for _ in range(at_once)]
        return [tuple(answer.result()["token_ids"]) for answer in answers]


def draw_everywhere(server: Server) -> set[tuple[int, ...]]:
    """Sample in each lane that engine 1 has beside others, of one engine and of two."""
    found = []
    for layout in (APART, PAIRS):
        server.layout(layout)
        found += draw(server, len(layout))
    return set(found)


OF_STOCK = Served(
    "random_numbers", "llama", STOCK_FLAGS, [PROMPT, DRAWN], lambda stock: draw(stock, 1)
)


def test_the_first_samples_of_a_server_are_those_of_stock(server: Server) -> None:
    """Nothing that is run at the start has drawn random numbers of lane 1."""
    (first,) = draw(server, 1)
    assert server.status()["layout"] == APART
    assert OF_STOCK.answers() == [list(first)]


def test_two_groups_sample_differently(server: Server) -> None:
    """Both children of a request with n = 2 are sampled at once, each in a group of its own."""
    server.layout(PAIRS)
    body = {"model": server.model, "prompt": PROMPT, "n": 2, "return_token_ids": True, **DRAWN}
    for _ in range(4):
        answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
        first, second = [choice["token_ids"] for choice in answer["choices"]]
        assert first != second


def test_no_sample_is_repeated_after_losses(server: Server) -> None:
    """Neither by the engine that was lost, nor by the group that it is in."""
    rounds = []
    for _ in range(2):
        kill(server, 1)
        wait_until(lambda: is_whole(server), server.log, BACK_S)
        rounds.append(draw_everywhere(server))
    assert rounds[0].isdisjoint(rounds[1])
