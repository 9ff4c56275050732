"""The demo's load: a number of streams at all times, every token with its time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from flying_serving.errors import RequestFailed
from flying_serving.testing.sse import Event, EventStream, streamed

PROMPT_TOKENS = (32, 160)
MAX_TOKENS = (48, 144)
"""Drawn for each request, so that streams do not end and begin all at once."""
VOCABULARY = 256
"""Prompts are byte tokens of the tiny model's tokenizer."""
REQUEST_S = 120.0


@dataclass
class TimedStream:
    """One request: how many tokens were asked for, when it was sent, and when how many came."""

    max_tokens: int
    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that have come."""
        return sum(count for _, count in self.arrivals)

    @property
    def problem(self) -> str | None:
        """Why this is not what was asked for, or None."""
        if self.error is not None:
            return self.error
        if self.finish_reason != "length" or self.tokens != self.max_tokens:
            return f"truncated: {self.tokens} of {self.max_tokens} tokens, finish_reason {self.finish_reason}"
        return None


class Load:
    """Keeps `width` streams of the present phase going; those of earlier phases go on until they end.

    A phase is what lies between two switches. So each layout gets `width` streams that began under it, whatever the
    ones before it still have to do.
    """

    def __init__(self, url: str, model: str, width: int, seed: int = 0) -> None:
        self.streams: list[TimedStream] = []
        self._model = model
        self._width = width
        self._random = random.Random(seed)
        self._phase = 0
        self._tasks: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits, trust_env=False)

    def next_phase(self) -> None:
        """Begin `width` new streams; those that run are not replaced when they end."""
        self._phase += 1
        for _ in range(self._width):
            self._begin()

    async def finish(self) -> None:
        """Begin nothing any more, wait for every stream, close the connections."""
        self._phase += 1
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def cancel(self) -> None:
        """Drop every stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _begin(self) -> None:
        task = asyncio.create_task(self._keep_going(self._phase))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_going(self, phase: int) -> None:
        while phase == self._phase:
            prompt = [self._random.randrange(VOCABULARY) for _ in range(self._random.randint(*PROMPT_TOKENS))]
            stream = TimedStream(self._random.randint(*MAX_TOKENS), time.monotonic())
            self.streams.append(stream)
            try:
                await self._run(stream, prompt)
            except (RequestFailed, httpx.HTTPError, msgspec.DecodeError, IndexError) as error:
                stream.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2)  # a server that is gone is not asked thousands of times

    async def _run(self, stream: TimedStream, prompt: Sequence[int]) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": stream.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with streamed(self._http, body, EventStream()) as events:
            async for event in events:
                _note(stream, event, time.monotonic())


def _note(stream: TimedStream, event: Event, now: float) -> None:
    """Note one server-sent event."""
    if event.error is not None:
        stream.error = str(event.error)
        return
    choice = event.choices[0]
    if choice.tokens:
        stream.arrivals.append((now, choice.tokens))
    if choice.finish_reason is not None:
        stream.finish_reason = choice.finish_reason
