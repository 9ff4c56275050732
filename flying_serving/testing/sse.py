"""Streamed completions: the request, and the events of the answer, taken from its bytes."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec

from flying_serving.errors import RequestFailed

DONE = b"[DONE]"
SHOWN = 2000
"""Characters of an answer that is not 200."""


class Choice(msgspec.Struct):
    """What of a choice is looked at. `token_ids` is there if the server knows `return_token_ids`."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens in this event; without ids, a text is counted as one."""
        return bool(self.text) if self.token_ids is None else len(self.token_ids)


class Usage(msgspec.Struct):
    """The server's own count."""

    completion_tokens: int | None = None


class Metrics(msgspec.Struct):
    """What vLLM says with `--enable-per-request-metrics`."""

    queue_time_ms: float | None = None


class Event(msgspec.Struct):
    """One event. An error has whatever form the server gives it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Any = None


_DECODE: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode


class EventStream:
    """Cuts the bytes of an answer into events, however they arrive; `decode` makes an event of its JSON."""

    def __init__(self, decode: Callable[[bytes], Any] = _DECODE) -> None:
        self.done = False
        """Whether `[DONE]` has arrived."""
        self._rest = b""
        self._decode = decode

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the events that are complete with these bytes. Comments and other fields than `data` mean nothing here.

        Raises:
            msgspec.DecodeError: for an event that is not JSON, or not of this form.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == DONE:
                self.done = True
            elif payload:
                yield self._decode(payload)


@asynccontextmanager
async def streamed(
    http: httpx.AsyncClient, body: Mapping[str, Any], events: EventStream, path: str = "/v1/completions"
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
