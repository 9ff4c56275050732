"""Models that give vectors or scores: each engine serves them alone, as stock vLLM does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.live import FLAGS, Server
from tests.stock.served import Served

pytestmark = pytest.mark.server

ENGINES = 2
BASE = (
    *(flag for flag in FLAGS if not flag.startswith(("--policy", "--logits"))),
    "--runner=pooling",
)
PROMPTS = [
    [(7 * number + 13 * place) % 500 for place in range(1, 60 * number + 9)] for number in range(8)
]
TEXTS = ["a short one", "another, which is somewhat longer than the first", "the last"]
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"input": PROMPTS}),
    ("/v1/embeddings", {"input": TEXTS}),
    ("/pooling", {"input": PROMPTS[:3], "task": "embed"}),
    ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}),
    ("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}),
)
WORST = 1e-5


def numbers(value: Any) -> list[float]:
    """Every vector, score and place of an answer, in its order."""
    if isinstance(value, dict):
        kept = (
            value[key]
            for key in ("data", "results", "embedding", "score", "relevance_score", "index")
            if key in value
        )
        return [number for part in kept for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def answer(server: Server, path: str, body: dict[str, Any]) -> list[float]:
    response = server.http.post(path, json={"model": server.model, **body})
    assert response.status_code == 200, response.text
    return numbers(response.json())


def answer_all(server: Server) -> list[list[float]]:
    return [answer(server, path, body) for path, body in CALLS]


OF_STOCK = Served("pooling", "qwen3", BASE, CALLS, answer_all)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("qwen3", ENGINES, "--policy=auto", base=BASE) as live:
        yield live


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """What stock vLLM answers."""
    answers: list[list[float]] = OF_STOCK.answers()
    return answers


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_answers_are_those_of_stock(server: Server, expected: list[list[float]], call: int) -> None:
    found = answer(server, *CALLS[call])
    assert found == pytest.approx(expected[call], abs=WORST)


def test_many_at_once_are_answered_by_all_engines(
    server: Server, expected: list[list[float]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: answer(server, *CALLS[0]), range(16)))
    for found in answers:
        assert found == pytest.approx(expected[0], abs=WORST)
    steps = server.metric("flying:step_duration_seconds_count", "group_size")
    assert set(steps) == {("1",)}
    server.until_idle()
    server.check()


def test_groups_are_not_offered(server: Server) -> None:
    status = server.status()
    assert status["group_sizes"] == [1]
    assert status["not_offered"] == {"2": "pooling models run on each engine alone"}


def test_an_order_of_a_group_is_refused_in_words(server: Server) -> None:
    response = server.http.post("/flying/layout", json={"groups": [[0, 1]]})
    assert response.status_code == 400
    assert "this policy decides the layout" in response.text
