"""The four requests of this suite, greedy and seeded, and what stock vLLM answers to them.

`python -m tests.stock.served smoke` asks stock vLLM again.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx

from harness.live import FLAGS, KEEP_ALIVE, Server
from harness.streams import WORST_LOGPROB, begin, streamed_body, worst_difference
from tests.stock.requests import tokens
from tests.stock.served import Served

OUTPUTS = 240
"""Tokens of each answer. To stream them takes far longer than a change of layout."""
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": tokens(65, 20), "temperature": 0.0},
    "greedy, longer": {"prompt": tokens(63, 150), "temperature": 0.0},
    "seeded": {"prompt": tokens(72, 60), "temperature": 1.0, "seed": 72},
    "seeded, longer": {"prompt": tokens(77, 200), "temperature": 1.0, "seed": 77},
}
"""At each step the sampled token leads the next one by more than 3e-3, in logits plus noise.
Degrees, batches and machines differ by about 2e-5.
"""
PROMPT_TOKENS = sum(len(fields["prompt"]) for fields in REQUESTS.values())
ALL: dict[str, Any] = {"max_tokens": OUTPUTS, "ignore_eos": True}
Answer = tuple[list[int], list[float]]
"""Tokens and their logprobs."""
_salts = itertools.count()


def ask_stock(server: Server) -> dict[str, Answer]:
    """The answers of stock vLLM's server to all requests, one after the other."""
    choices = {name: server.complete(**fields, **ALL) for name, fields in REQUESTS.items()}
    return {
        name: (choice["token_ids"], choice["logprobs"]["token_logprobs"])
        for name, choice in choices.items()
    }


OF_STOCK = Served(
    "smoke",
    "llama",
    tuple(flag for flag in FLAGS if not flag.startswith("--policy")),
    [REQUESTS, ALL],
    ask_stock,
)


@cache
def of_stock() -> dict[str, Answer]:
    """What stock vLLM answers on one device."""
    answers: dict[str, Answer] = OF_STOCK.answers()
    return answers


def compare(found: Answer, stock: Answer) -> None:
    """The same tokens, with logprobs that differ by rounding."""
    assert found[0] == stock[0]
    assert worst_difference(found[1], stock[1]) <= WORST_LOGPROB


@asynccontextmanager
async def streams_answer_as_stock(server: Server) -> AsyncIterator[None]:
    """All requests stream as the body of this context begins. After it they are read to their end,
    and have answered what stock vLLM answers.

    No prefix cache has anything of them: all their KV is computed or pulled.
    """
    fresh = ALL | {"cache_salt": f"{next(_salts)}"}
    bodies = [streamed_body(server.model, **fields, **fresh) for fields in REQUESTS.values()]
    async with httpx.AsyncClient(
        base_url=server.url, headers=server.http.headers, timeout=120, limits=KEEP_ALIVE
    ) as http:
        streams, tasks = await begin(http, bodies)
        try:
            yield
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    for name, stream in zip(REQUESTS, streams, strict=True):
        compare((stream.tokens, stream.logprobs), of_stock()[name])
        assert stream.done and stream.finish_reason == "length", name


async def answers_as_stock(server: Server) -> None:
    """All requests at once, and nothing beside them."""
    async with streams_answer_as_stock(server):
        pass
