"""The events of a streamed completion, taken from the bytes of the answer."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

DONE = b"[DONE]"


class Choice(msgspec.Struct):
    """The fields of a choice that the client reads. `token_ids` is there if the server knows
    `return_token_ids`.
    """

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens in this event; without ids, a text is counted as one."""
        return bool(self.text) if self.token_ids is None else len(self.token_ids)


class Usage(msgspec.Struct):
    """The server's own counts of tokens."""

    completion_tokens: int | None = None


class Metrics(msgspec.Struct):
    """The metrics that vLLM adds with `--enable-per-request-metrics`."""

    queue_time_ms: float | None = None


class Event(msgspec.Struct):
    """One event. An error has the form that the server gives it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Any = None


_DECODE: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode


class EventStream:
    """A parser that cuts the bytes of an answer into events, with any chunks; `decode` makes an
    event of its JSON.
    """

    def __init__(self, decode: Callable[[bytes], Any] = _DECODE) -> None:
        self.done = False
        """True once `[DONE]` has arrived."""
        self._rest = b""
        self._decode = decode

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the events that are complete with these bytes. Comments and other fields than
        `data` mean nothing here.

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
