"""Models that give vectors or scores: each engine serves them alone, as stock vLLM does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.live import FLAGS, Server
from tests.deep.conformance.live import Live
from tests.stock.served import Served

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
MOST_WAITING = 200
MOST_INPUTS = 2 * 16 + MOST_WAITING
"""Of one call to two engines: --max-num-seqs of each, and --max-waiting-requests."""
CLIENTS = 8


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


OF_STOCK = Served(
    "pooling", "qwen3", BASE, CALLS, lambda stock: [answer(stock, *call) for call in CALLS]
)


def every_call(live: Live) -> None:
    """Each is answered as stock vLLM answers it."""
    for call, expected in zip(CALLS, OF_STOCK.answers(), strict=True):
        assert answer(live, *call) == pytest.approx(expected, abs=WORST), call[0]
    live.check()


def many_at_once(live: Live) -> None:
    """All engines answer them, each alone."""
    expected = OF_STOCK.answers()[0]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda _: answer(live, *CALLS[0]), range(2 * CLIENTS)))
    for found in answers:
        assert found == pytest.approx(expected, abs=WORST)
    steps = live.metric("flying:step_duration_seconds_count", "group_size")
    assert set(steps) == {("1",)}
    live.until_idle()
    live.check()


def too_many_inputs_are_refused(live: Live) -> None:
    """A call of more than an idle server admits gets 400, and not 429 at every try."""
    for path, field, count in (("/v1/embeddings", "input", 300), ("/rerank", "documents", 301)):
        body = {"model": live.model, "query": "a", field: ["a"] * 300}
        response = live.http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == field
        says = f"{field}: {count} prompts, must be at most {MOST_INPUTS} on this server"
        assert says in error["message"], error
    live.until_idle()


def groups_are_refused(live: Live) -> None:
    """They are not offered, and an order of one is refused in words."""
    status = live.status()
    assert status["group_sizes"] == [1]
    assert status["not_offered"] == {"2": "pooling models run on each engine alone"}
    response = live.http.post("/flying/layout", json={"groups": [[0, 1]]})
    assert response.status_code == 400
    assert "this policy decides the layout" in response.text
