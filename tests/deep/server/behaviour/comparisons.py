"""Requests of all kinds to two engines, and the comparison of their answers."""

import random
from collections import Counter
from typing import Any

import httpx

from harness.live import Server
from harness.streams import WORST_LOGPROB, Stream, streamed_body, worst_difference

ALONE, TOGETHER = [[0], [1]], [[0, 1]]
LANES = (1, 2)
PROGRESS_S = 60.0
LONG_TOKENS = 2000


def prompt(seed: int, count: int) -> list[int]:
    """Tokens of printable ASCII: after broken UTF-8 vLLM's text begins with the prompt's."""
    draw = random.Random(seed)
    return [draw.randrange(32, 127) for _ in range(count)]


def sampling(
    seed: int | None, max_tokens: int, degree: int | None = None, **fields: Any
) -> dict[str, Any]:
    """Fields of a request at temperature 1."""
    extra = fields.pop("extra", {}) | ({} if degree is None else {"tp_degree": degree})
    xargs = {"vllm_xargs": extra} if extra else {}
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        **xargs,
        **fields,
    }


def post(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(path, json={"model": server.model, **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def same(ours: Stream, reference: Stream) -> None:
    assert ours.tokens == reference.tokens
    assert ours.finish_reason == reference.finish_reason
    assert worst_difference(ours.logprobs, reference.logprobs) <= WORST_LOGPROB


# ---- operation


async def count_steps(http: httpx.AsyncClient) -> Counter[int]:
    """Steps that engines have led so far, by lane."""
    engines = (await http.get("/flying/status")).json()["engines"]
    made: Counter[int] = Counter()
    for engine in engines:
        made.update({int(size): count for size, count in engine["steps"].items()})
    return made


def long_request(server: Server, seed: int) -> dict[str, Any]:
    return streamed_body(server.model, prompt(seed, 20), **sampling(seed, LONG_TOKENS))
