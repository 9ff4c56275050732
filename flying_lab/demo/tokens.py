"""The tokens of a few greedy requests in every layout: each has to be the same as with engines
apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from flying_lab.demo.server import SIZES, layout_of
from flying_lab.demo.split import body
from flying_serving.cli.render import degrees_text

PROMPT_TOKENS = (33, 64, 127, 200)
ANSWER_TOKENS = 24
ANSWER_S = 60.0

Answers = Sequence[Sequence[int]]
"""The tokens of each request."""


def collect(url: str) -> dict[str, Answers]:
    """Send the same requests in every layout. Returns their tokens by layout, engines apart first.

    The server is idle. It is left in the last layout.
    """
    return asyncio.run(_collect(url))


def wrong(by_layout: Mapping[str, Answers]) -> list[str]:
    """Return the requests whose tokens are missing, or differ from those of the first layout."""
    apart = next(iter(by_layout.values()))
    found = []
    for layout, answers in by_layout.items():
        for prompt_tokens, expected, tokens in zip(PROMPT_TOKENS, apart, answers, strict=True):
            request = f"layout {layout}, prompt of {prompt_tokens} tokens"
            if len(tokens) != ANSWER_TOKENS:
                found.append(f"{request}: {len(tokens)} of {ANSWER_TOKENS} tokens came")
            elif list(tokens) != list(expected):
                found.append(f"{request}: {tokens} in place of {expected}")
    return found


def line(by_layout: Mapping[str, Answers]) -> str:
    """Return the outcome in one sentence, if no token is wrong."""
    count = sum(map(len, next(iter(by_layout.values()))))
    return (
        f"the same {len(PROMPT_TOKENS)} requests in the layouts {', '.join(by_layout)}: all "
        f"{count} tokens are the same in each"
    )


async def _collect(url: str) -> dict[str, Answers]:
    by_layout: dict[str, Answers] = {}
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        for groups in map(layout_of, SIZES):
            answer = await http.post("/flying/layout", json={"groups": groups})
            answer.raise_for_status()
            requests = (body(model, length, ANSWER_TOKENS) for length in PROMPT_TOKENS)
            by_layout[degrees_text(groups)] = await asyncio.gather(
                *(_answer(http, request) for request in requests)
            )
    return by_layout


async def _answer(http: httpx.AsyncClient, request: dict[str, Any]) -> list[int]:
    answer = await http.post("/v1/completions", json=request | {"stream": False})
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])
