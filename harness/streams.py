"""Streamed completions over token ids, read event by event as a client sees them."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from flying_lab.sse import EventStream

WORST_LOGPROB = 1e-4
"""How far logprobs of one request may differ between degrees and batches: float32, some ten times
what is seen.
"""
BEGUN_S = 60.0
SHOWN = 2000
"""Characters of an answer that is not 200."""


class RequestFailed(Exception):
    """A request that a server answered with an error, or whose answer is not what was asked for."""


@asynccontextmanager
async def streamed(
    http: httpx.AsyncClient,
    body: Mapping[str, Any],
    events: EventStream,
    path: str = "/v1/completions",
) -> AsyncIterator[AsyncIterator[Any]]:
    """The events of one streamed completion; the connection is closed at the end of the context.

    `http` has the server as its base URL, and `body` has `"stream": True`.

    Raises:
        RequestFailed: for an answer that is not 200.
    """

    async def arriving(answer: httpx.Response) -> AsyncGenerator[Any, None]:
        async for data in answer.aiter_bytes():
            for event in events.feed(data):
                yield event

    async with http.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise RequestFailed(f"{answer.status_code}: {text[:SHOWN]}")
        async with aclosing(arriving(answer)) as found:
            yield found


@dataclass
class Stream:
    """What has come of one streamed completion."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Tokens per event."""
    arrivals_s: list[float] = field(default_factory=list)
    """When each event with tokens came (time.monotonic)."""
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    """The server has closed the stream with [DONE]."""

    def take(self, event: dict[str, Any]) -> None:
        """Note one event; raises RequestFailed for an error or for tokens after the end."""
        if "error" in event:
            raise RequestFailed(f"error in the stream: {event['error']}")
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event["choices"]:
            if self.finish_reason is not None:
                raise RequestFailed(f"an event after finish_reason={self.finish_reason}: {choice}")
            tokens = choice.get("token_ids") or []
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if len(tokens) != len(logprobs):
                raise RequestFailed(
                    f"{len(tokens)} tokens with {len(logprobs)} logprobs in one event"
                )
            if tokens:
                self.chunks.append(len(tokens))
                self.arrivals_s.append(time.monotonic())
            self.tokens += tokens
            self.logprobs += logprobs
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")


def streamed_body(model: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """The body of a streamed completion that returns tokens, their logprobs and the usage."""
    return {
        "model": model,
        "prompt": list(prompt),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": 0,
        **fields,
    }


async def stream(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    leave_after: int | None = None,
    into: Stream | None = None,
) -> Stream:
    """Stream one completion.

    Args:
        leave_after: close the connection once so many tokens have come.
        into: where to note what comes, for who wants to look while it streams.

    Raises:
        RequestFailed: if the server refuses it, reports an error or goes on after the end.
    """
    result = Stream() if into is None else into
    incoming = EventStream(json.loads)
    async with streamed(http, body, incoming) as events:
        async for event in events:
            result.take(event)
            if leave_after is not None and len(result.tokens) >= leave_after:
                break
        result.done = incoming.done
    return result


async def begin(
    http: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], tokens: int = 1
) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """Stream completions, and return once each of them has so many tokens. Raises what ends one of
    them before.
    """
    streams = [Stream() for _ in bodies]
    tasks = [
        asyncio.create_task(stream(http, body, into=into))
        for body, into in zip(bodies, streams, strict=True)
    ]
    async with asyncio.timeout(BEGUN_S):
        while any(len(into.tokens) < tokens for into in streams):
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
    return streams, tasks


def worst_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference between two lists of logprobs of the same length."""
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
