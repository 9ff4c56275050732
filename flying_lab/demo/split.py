"""One split request, in the demo's first part: its prompt on one engine, its answer on another."""

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from flying_lab.sse import EventStream

PROMPT_TOKENS, ANSWER_TOKENS = 1000, 48
NEXT_TOKENS = 1900
"""Tokens of the next prompt, as long as the model allows."""
ANSWER_S = 60.0


@dataclass
class Seen:
    """Observations of a split request and of the next one.

    `first`, `second`: engines that have its prompt and its answer, None if no split was seen.
    `next_on`: the one that computes the next prompt meanwhile. `token_s`: when each token of its
    answer came. `begun`, `undone`: splits that the server counts.
    """

    first: int | None = None
    second: int | None = None
    next_on: int | None = None
    token_s: list[float] = field(default_factory=list)
    begun: int = 0
    undone: int = 0

    @property
    def line(self) -> str:
        """Return the events of the split request in one sentence."""
        gap_ms = 1e3 * max(b - a for a, b in pairwise(self.token_s))
        return (
            f"one request on two engines: engine {self.first} read its prompt of {PROMPT_TOKENS} "
            "tokens and passed it "
            f"on; engine {self.second} wrote the answer, at most {gap_ms:.0f} ms from word to "
            "word, "
            f"while engine {self.next_on} was already busy with the next long prompt"
        )

    @property
    def wrong(self) -> list[str]:
        """Return the problems of the split request, none if all went as it should."""
        found = []
        if len(self.token_s) != ANSWER_TOKENS:
            found.append(f"split request: {len(self.token_s)} of {ANSWER_TOKENS} tokens came")
        if (self.begun, self.undone) != (1, 0) or self.first is None or self.first == self.second:
            found.append(
                f"split request: {self.begun} splits, {self.undone} undone, {self.first} and "
                f"{self.second}"
            )
        if self.next_on != self.first:
            found.append(
                f"split request: the next prompt is on engine {self.next_on}, not {self.first}"
            )
        return found


def show(url: str) -> Seen:
    """Send a long prompt that is split at its end and, when its answer begins, the next one. The
    server is idle.
    """
    return asyncio.run(_show(url))


async def _show(url: str) -> Seen:
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        answering = asyncio.Event()
        split = {"vllm_xargs": {"split_at": PROMPT_TOKENS}}
        answer = asyncio.create_task(
            _stream(http, body(model, PROMPT_TOKENS, ANSWER_TOKENS) | split, seen, answering)
        )
        while not answering.is_set() and not answer.done():
            await asyncio.sleep(0.005)
            if shown := (await _view(http))["splits"]["shown"]:
                seen.first, seen.second = shown[0]["first"][0], shown[0]["second"][0]
        following = asyncio.create_task(_stream(http, body(model, NEXT_TOKENS, 1)))
        while seen.next_on is None and not following.done():
            await asyncio.sleep(0.005)
            groups = (await _view(http))["groups"]
            seen.next_on = next(
                (one["engines"][0] for one in groups if one["prefill_tokens"] >= NEXT_TOKENS), None
            )
        await asyncio.gather(answer, following)
        counts = (await _view(http))["splits"]
    seen.begun, seen.undone = counts["begun"], counts["undone"]
    return seen


async def _view(http: httpx.AsyncClient) -> Any:
    return (await http.get("/flying/view")).raise_for_status().json()


def body(model: str, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed completion of exactly these lengths; prompts of different
    lengths share no beginning.
    """
    token_ids = [(prompt_tokens + 7 * position) % 250 for position in range(prompt_tokens)]
    lengths = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": token_ids, "stream": True, "temperature": 0.0, **lengths}


async def _stream(
    http: httpx.AsyncClient,
    request: dict[str, Any],
    seen: Seen | None = None,
    begun: asyncio.Event | None = None,
) -> None:
    events = EventStream()
    async with http.stream("POST", "/v1/completions", json=request) as answer:
        answer.raise_for_status()
        async for data in answer.aiter_bytes():
            for event in events.feed(data):
                if seen is not None and begun is not None:
                    begun.set()
                    seen.token_s += [time.monotonic()] * sum(
                        choice.tokens for choice in event.choices
                    )
