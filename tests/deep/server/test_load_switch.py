"""Load alone switches a live server: `auto` is together while it is quiet, and a burst of HTTP
requests parts it.

Steps last as `harness/paced.py` says: together a long prompt takes half the time, and apart twice
as many requests run at once.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from flying_serving.controller.switches import SETTLE_S
from harness.live import Server
from harness.paced import Pace, pace
from harness.streams import WORST_LOGPROB, Stream, begin, stream, streamed_body, worst_difference

pytestmark = pytest.mark.server

PACED = pace(single=Pace(0.04, 0.001), pair=Pace(0.04, 0.0005))
SETTINGS = (
    "--policy=auto",
    "--max-num-batched-tokens=2048",
    "--max-num-seqs=4",
    "--kv-cache-memory-bytes=268435456",
    "--no-enable-prefix-caching",
)
TOGETHER, APART = [[0, 1]], [[0], [1]]
QUIET = (1900, 4)
"""Tokens of prompt and output of requests that come one after the other."""
LENGTHS = [(64, 120), *[(64, 24)] * 20]
"""Those of a long stream and of a burst that comes while it runs."""
QUIET_S, APART_S = 150.0, 5.0
"""How long to wait until the engines are together, and between two requests meanwhile."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, *SETTINGS, preamble=PACED) as live:
        yield live


def body(
    server: Server, number: int, prompt_tokens: int, output_tokens: int, **xargs: Any
) -> dict[str, Any]:
    """A request that is told its tokens: their logprobs tell whether it was served right, and no
    near tie can flip.
    """
    draw = random.Random(number)
    prompt, forced = (
        [draw.randrange(250) for _ in range(count)] for count in (prompt_tokens, output_tokens)
    )
    xargs |= {"force_token_ids": forced}
    return streamed_body(
        server.model, prompt, max_tokens=output_tokens, ignore_eos=True, vllm_xargs=xargs
    )


async def ask(server: Server, **xargs: Any) -> list[Stream]:
    """All requests: the first, and once it streams the others at once."""
    bodies = [body(server, number, *lengths, **xargs) for number, lengths in enumerate(LENGTHS)]
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
        _, begun = await begin(http, bodies[:1])
        return await asyncio.gather(*begun, *(stream(http, one) for one in bodies[1:]))


async def be_quiet(server: Server) -> None:
    """One request after the other, seconds apart, until the engines are together."""
    deadline_s = time.monotonic() + QUIET_S
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
        asked_s = -APART_S
        while (shown := (await http.get("/flying/status")).json())["layout"] != TOGETHER:
            assert time.monotonic() < deadline_s, (shown, server.switches())
            if time.monotonic() > asked_s + APART_S:
                await stream(http, body(server, 1000, *QUIET))
                asked_s = time.monotonic()
            await asyncio.sleep(0.1)


def test_a_burst_parts_the_engines_and_every_stream_is_right(server: Server) -> None:
    asyncio.run(be_quiet(server))
    before = len(server.switches())
    answers = asyncio.run(ask(server))
    made = server.switches()[before:]
    assert made, "no switch"
    assert made[0]["from"] == TOGETHER
    assert made[0]["to"] == APART
    assert made[0]["problem"] is None
    assert made[0]["reason"].startswith("load: ")
    assert made[0]["requests_in_flight"] >= 1
    alone = asyncio.run(ask(server, tp_degree=1))
    for number, (answer, other) in enumerate(zip(answers, alone, strict=True)):
        assert (
            answer.tokens
            == other.tokens
            == body(server, number, *LENGTHS[number])["vllm_xargs"]["force_token_ids"]
        )
        assert answer.done and answer.finish_reason == "length"
        assert worst_difference(answer.logprobs, other.logprobs) <= WORST_LOGPROB
    server.check()


def test_quiet_joins_the_engines_again(server: Server) -> None:
    asyncio.run(be_quiet(server))
    last = server.switches()[-1]
    assert last["from"] == APART
    assert last["to"] == TOGETHER
    assert last["reason"][:6] == "load: "


def test_switches_for_load_are_seconds_apart(server: Server) -> None:
    """In all that the server did above; a tenth of a second is left for clocks."""
    times_s = [one["time"] for one in server.switches() if one["reason"].startswith("load: ")]
    assert len(times_s) >= 3
    assert min(later - earlier for earlier, later in pairwise(times_s)) > SETTLE_S - 0.1
