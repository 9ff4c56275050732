"""Records the walks on two live servers of two engines each, in some minutes.

Whoever changes the walks' code, and finds other files on one, records it again: `python -m house
--record`.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from harness.live import BLOCK_BYTES, Server, wait_until
from harness.losing import is_whole, kill
from harness.paced import Pace, pace
from harness.streams import begin, stream, streamed_body
from house.page import walks_of_page
from house.source import PRODUCT, functions, modules
from house.walks import WALKS, Record, Recording, record_of
from house.windows import Windows

ROUNDS = 3
IDLE_S = 10
"""Longer than everything that a server does again and again takes to come round."""
BACK_S, TIMEOUT_S = 120.0, 120.0
APART, TOGETHER = [[0], [1]], [[0, 1]]
SHORT, LONG = 24, 240
"""Tokens of an answer. A long one streams through a change of layout, or a loss."""
PACED = pace(single=Pace(0.05), pair=Pace(0.2))
"""By these steps a group is the worse layout for every load: the recorded switch is made for a
request that no engine can hold, and the engines part after it.
"""
BY_AUTO = (
    "--policy=auto",
    "--max-model-len=2500",
    "--max-num-batched-tokens=512",
    f"--kv-cache-memory-bytes={65 * BLOCK_BYTES}",
    "--no-enable-prefix-caching",
    "--no-token-parallel",  # whether such steps are shorter depends on the load of the machine
)
TOO_LONG = 2300
"""Tokens of that request's prompt. An engine holds 2,048."""


def record() -> dict[str, Record]:
    """Record all walks. Returns what each has entered."""
    with tempfile.TemporaryDirectory() as folder:
        windows = Windows(Path(folder))
        _by_an_operator(windows)
        _by_auto(windows)
        return records(windows.entered())


def records(recording: Recording) -> dict[str, Record]:
    """Return the records of all walks."""
    below = f"{PRODUCT}/"
    sizes = {
        (module.path.removeprefix(below), name): size
        for module in modules(PRODUCT)
        for name, size in functions(module).items()
    }
    named = walks_of_page()
    return {walk.name: record_of(walk, recording, sizes, named[walk.heading]) for walk in WALKS}


def _by_an_operator(windows: Windows) -> None:
    """All windows but that of a switch by `auto`."""
    with ExitStack() as stack:
        with windows.open("start"):
            server = stack.enter_context(Server("llama", 2, preamble=windows.preamble))
        for layout in (TOGETHER, APART):
            server.layout(layout)
            with windows.open("idle"):
                _be_idle(server)
        for number in range(ROUNDS):
            for name, layout in (("request in a group", TOGETHER), ("request alone", APART)):
                with windows.open("order"):
                    server.layout(layout, "migrate")
                with windows.open(name):
                    asyncio.run(_ask(server, _prompt(number, 100)))
            asyncio.run(_migrate(windows, server, number))
            asyncio.run(_lose(windows, server, number))


def _by_auto(windows: Windows) -> None:
    """The window of a switch by `auto`."""
    with Server("llama", 2, *BY_AUTO, preamble=f"{windows.preamble}; {PACED}") as server:
        for number in range(ROUNDS):
            wait_until(lambda: server.status()["layout"] == APART, server.switches)
            server.until_idle()
            with windows.open("switch by auto"):
                asyncio.run(_ask(server, _prompt(number, TOO_LONG)))


def _prompt(number: int, tokens: int) -> list[int]:
    """A prompt that no other request shares a prefix with."""
    draw = random.Random(f"{number} {tokens}")
    return [draw.randrange(250) for _ in range(tokens)]


def _body(server: Server, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    return streamed_body(server.model, prompt, max_tokens=output_tokens, ignore_eos=True)


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S)


async def _ask(server: Server, prompt: Sequence[int]) -> None:
    async with _client(server) as http:
        await stream(http, _body(server, prompt, SHORT))


def _be_idle(server: Server) -> None:
    """Nothing but what other windows ask of a server beside their walk."""
    until_s = time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        server.status()
        time.sleep(0.5)


async def _migrate(windows: Windows, server: Server, number: int) -> None:
    """A request streams on one engine, and goes on in a group of both."""
    async with _client(server) as http:
        _, tasks = await begin(http, [_body(server, _prompt(number, 101), LONG)])
        with windows.open("migration"):
            await asyncio.to_thread(server.layout, TOGETHER, "migrate")
            await asyncio.gather(*tasks)


async def _lose(windows: Windows, server: Server, number: int) -> None:
    """A request streams in a group that loses an engine, and goes on alone. The engine returns, and
    the layout is made again.
    """
    async with _client(server) as http:
        _, tasks = await begin(http, [_body(server, _prompt(number, 102), LONG)])
        with windows.open("loss"):
            await asyncio.to_thread(kill, server, 1)
            await asyncio.gather(*tasks)
            wait_until(lambda: is_whole(server), server.log, BACK_S)
            wait_until(lambda: server.status()["layout"] == TOGETHER, server.status)
            server.until_idle()
