"""Clients of a flood: each request has a connection, and is written and read as bytes: clients
share the cores.

An answer is not parsed: its events are counted as they come. All outputs have the length that was
asked for, so what was put together into one event is known at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

EVENT, DONE = b"data: {", b"data: [DONE]"
SLOW_S, SLOW_BYTES = 1.0, 256
"""A slow reader takes so many bytes, about one event, each second, and its socket holds little
more.
"""
REFUSED_S = 1.0
"""After this a client of a closed loop that was refused comes again."""
LATEST_S = 120.0
"""After this a request has failed."""
TEMPLATES = 64
FIRST_TOKENS = 6
"""Random tokens in front of each prompt, so that no prefix is cached."""


@dataclass(frozen=True)
class Mix:
    """Lengths, drawn evenly, and the shares of clients that leave or read slowly."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    leaving: float = 0.0
    slow: float = 0.0


@dataclass
class Outcome:
    """One request and what came: `event_s` has the time of each token; `status` is 0 if no answer
    began.

    `leave_after`: its client leaves when it has so many events; None: it stays. `done`: its stream
    has ended well.
    """

    output_tokens: int
    leave_after: int | None = None
    slow: bool = False
    sent_s: float = 0.0
    status: int = 0
    event_s: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.event_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    def take(self, data: bytes, rest: bytes) -> bytes:
        """Note bytes behind `rest`, which is what the call before returned."""
        now_s = time.monotonic()
        if not self.status:
            self.status = int(data[9:12])
        data = rest + data
        end = data.rfind(b"\n") + 1
        self.event_s += [now_s] * data.count(EVENT, 0, end)
        if self.status == 200 and data.find(DONE, 0, end) >= 0:
            self.done = True
            self.event_s += [now_s] * (self.output_tokens - len(self.event_s))
        return data[end:]

    @property
    def leaves(self) -> bool:
        """Whether its client goes away now."""
        return (
            self.leave_after is not None
            and self.status > 0
            and len(self.event_s) >= self.leave_after
        )


class _Reader(asyncio.Protocol):
    """Reads as fast as it can, or leaves."""

    def __init__(self, request: bytes, outcome: Outcome) -> None:
        self._request = request
        self._outcome = outcome
        self._rest = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._rest = self._outcome.take(data, self._rest)
        if self._outcome.leaves:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Clients:
    """Sends requests to the server at `host` and `port`; `sent` has all of them."""

    def __init__(self, host: str, port: int, model: str, draw: random.Random) -> None:
        self._address = host, port
        self._model = model
        self._draw = draw
        self._templates = [
            ",".join(str(draw.randrange(300, 500)) for _ in range(2048)) for _ in range(TEMPLATES)
        ]
        self.sent: list[Outcome] = []

    def reseed(self, seed: int) -> None:
        """Draw again as from this seed on."""
        self._draw.seed(seed)

    def _request(self, prompt_tokens: int, output_tokens: int) -> bytes:
        draw = self._draw
        first = ",".join(str(draw.randrange(300, 500)) for _ in range(FIRST_TOKENS))
        # three digits and a comma
        rest = draw.choice(self._templates)[: 4 * (prompt_tokens - FIRST_TOKENS) - 1]
        options = json.dumps(
            {"model": self._model, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        )
        body = f'{{"prompt":[{first},{rest}],{options[1:]}'.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: close\r\n"
        return (
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    async def one(self, mix: Mix) -> Outcome:
        """Send one request of the mix and read what comes, to its end or the client's."""
        draw = self._draw
        output_tokens, kind = draw.randint(*mix.output_tokens), draw.random()
        leaves, slow = kind < mix.leaving, mix.leaving <= kind < mix.leaving + mix.slow
        outcome = Outcome(output_tokens, draw.randrange(output_tokens) if leaves else None, slow)
        request = self._request(draw.randint(*mix.prompt_tokens), output_tokens)
        self.sent.append(outcome)
        outcome.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(LATEST_S):
                await (self._slowly if slow else self._fast)(request, outcome)
        except (OSError, TimeoutError):
            pass  # as it is, its stream has not ended
        return outcome

    async def _fast(self, request: bytes, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(
            lambda: _Reader(request, outcome), *self._address
        )
        try:
            await reader.ended
        finally:
            transport.abort()

    async def _slowly(self, request: bytes, outcome: Outcome) -> None:
        loop, rest = asyncio.get_running_loop(), b""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
            connection.setblocking(False)
            await loop.sock_connect(connection, self._address)
            await loop.sock_sendall(connection, request)
            while data := await loop.sock_recv(connection, SLOW_BYTES):
                rest = outcome.take(data, rest)
                if outcome.done or outcome.status != 200:
                    return
                await asyncio.sleep(SLOW_S)

    async def closed(self, mix: Mix, seconds: float, clients: int) -> None:
        """So many clients, each of which sends its next request when the last one is over; then all
        are awaited.
        """
        until_s = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until_s:
                if (await self.one(mix)).status != 200:
                    await asyncio.sleep(REFUSED_S)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, mix: Mix, arrivals_s: Sequence[float]) -> list[asyncio.Task[Outcome]]:
        """Send requests at these times from now on, whatever became of those before. Returns all of
        them.
        """
        began_s, tasks = time.monotonic(), []
        for at_s in arrivals_s:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(mix)))
        return tasks
