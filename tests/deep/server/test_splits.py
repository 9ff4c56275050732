"""Requests that two groups share answer what stock vLLM answers, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from flying_lab.sse import EventStream
from flying_serving.config import MODES
from harness.live import KEEP_ALIVE, KEY, Server
from harness.streams import WORST_LOGPROB, Stream, stream, streamed, streamed_body, worst_difference
from tests.deep.server.splitting import (
    BUSY,
    BY_NAME,
    LAYOUTS,
    LEAVE_SHARE,
    PULLED,
    QUIET,
    SHAPES,
    STORM_LAYOUTS,
    STORM_PAUSE_S,
    STORM_REQUESTS,
    STORM_SWITCHES,
    Splitting,
)
from tests.stock.requests import VOCAB, StockRequest, tokens

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Splitting]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        live = Splitting(request.param)
    with live:
        yield live


@pytest.fixture
async def http(server: Splitting) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=KEEP_ALIVE) as client:
        yield client


every_shape = pytest.mark.parametrize("server", SHAPES, indirect=True)
a_llama = pytest.mark.parametrize("server", SHAPES[:1], indirect=True)
each_degree = pytest.mark.parametrize("degree", LAYOUTS)


@every_shape
@each_degree
async def test_splits_at_every_boundary_are_as_stock(
    server: Splitting, http: httpx.AsyncClient, degree: int
) -> None:
    """Of a request alone the second group pulls all tokens before the split, and computes none of
    them again.
    """
    server.layout(LAYOUTS[degree])
    before = server.counts()
    for name, split in QUIET.items():
        body = server.body(BY_NAME[name], split, cache_salt=f"{name} at degree {degree}")
        server.compare(BY_NAME[name], degree, await stream(http, body))
    made = server.counts() - before
    split_tokens = sum(QUIET.values())
    assert made == {
        "migrated": len(QUIET),
        "migrated_tokens": split_tokens,
        "pulled": split_tokens,
        "prompt": sum(split < len(BY_NAME[name].prompt) for name, split in QUIET.items()),
        "output": sum(split >= len(BY_NAME[name].prompt) for name, split in QUIET.items()),
    }
    bodies = [server.body(BY_NAME[name], split) for name, split in BUSY.items()]
    for name, answer in zip(
        BUSY, await asyncio.gather(*(stream(http, body) for body in bodies)), strict=True
    ):
        server.compare(BY_NAME[name], degree, answer)
    server.nothing_is_left()


# ---- what a request asks for

PROMPT, OUTPUTS = 40, 48
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": OUTPUTS, "ignore_eos": True, "logprobs": 0}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
STOPS = {"stop_token_ids": [*range(0, VOCAB, 8)]}
ASKED: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "greedy": PENALTIES | {"temperature": 0.0, "seed": None},
    "grammar": {"structured_outputs": {"regex": "[ab]{10}-[0-9]{20}"}, "ignore_eos": False},
    "min_tokens and stop": STOPS | {"min_tokens": 35},
    "logprobs, top-k and top-p": {"logprobs": 5, "top_k": 200, "top_p": 0.9},
    "two choices": {"n": 2},
}
ENDING = ("grammar", "min_tokens and stop")
"""These end before they have all their tokens."""
SPLITS = (17, PROMPT, PROMPT + 1, PROMPT + 30, PROMPT + 31, PROMPT + OUTPUTS - 2)
"""A grammar's end is token 31 of the output; a least number of tokens is more than most of
these.
"""


async def complete(
    http: httpx.AsyncClient, model: str, split: int | None, **fields: Any
) -> list[dict[str, Any]]:
    """The choices of a request of PROMPT tokens, not streamed."""
    extra = {} if split is None else {"vllm_xargs": {"split_at": split}, "cache_salt": str(split)}
    body = {
        "model": model,
        "prompt": tokens(20, PROMPT),
        "return_token_ids": True,
        **SEEDED,
        **fields,
        **extra,
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def same_choices(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """All but that logprobs are those of other batches."""
    for choice, other in zip(ours, theirs, strict=True):
        logprobs, others = choice["logprobs"], other["logprobs"]
        assert {**choice, "logprobs": None} == {**other, "logprobs": None}
        assert (
            worst_difference(logprobs["token_logprobs"], others["token_logprobs"]) <= WORST_LOGPROB
        )
        for top, expected in zip(logprobs["top_logprobs"], others["top_logprobs"], strict=True):
            assert top == pytest.approx(expected, abs=WORST_LOGPROB)


@a_llama
@each_degree
@pytest.mark.parametrize("asked", ASKED)
async def test_split_request_gets_its_sampling_parameters(
    server: Splitting, http: httpx.AsyncClient, degree: int, asked: str
) -> None:
    server.layout(LAYOUTS[degree])
    whole = await complete(http, server.model, None, **ASKED[asked])
    before = server.counts()
    for answer in await asyncio.gather(
        *(complete(http, server.model, split, **ASKED[asked]) for split in SPLITS)
    ):
        same_choices(answer, whole)
    made = server.counts() - before
    assert made["prompt"] == len(whole)
    assert made["output"] == len(whole) * (len(SPLITS) - 1)
    assert {choice["finish_reason"] for choice in whole} == {
        "stop" if asked in ENDING else "length"
    }


@a_llama
@each_degree
async def test_streamed_choices_are_split_each_by_itself(
    server: Splitting, http: httpx.AsyncClient, degree: int
) -> None:
    server.layout(LAYOUTS[degree])
    whole = await complete(http, server.model, None, n=2)
    before = server.counts()

    async def choices(split: int) -> list[Stream]:
        found = [Stream() for _ in whole]
        told = {"n": 2, "vllm_xargs": {"split_at": split}, "cache_salt": f"streamed, {split}"}
        body = streamed_body(server.model, tokens(20, PROMPT), **SEEDED | told)
        async with streamed(http, body, EventStream(json.loads)) as events:
            async for event in events:
                for choice in event["choices"]:
                    found[choice["index"]].take({"choices": [choice]})
        return found

    for found in await asyncio.gather(*map(choices, SPLITS)):
        for mine, other in zip(found, whole, strict=True):
            ends = mine.tokens, mine.text, mine.finish_reason
            assert ends == (other["token_ids"], other["text"], other["finish_reason"])
            assert (
                worst_difference(mine.logprobs, other["logprobs"]["token_logprobs"])
                <= WORST_LOGPROB
            )
    made = server.counts() - before
    assert made["prompt"] + made["output"] == len(whole) * len(SPLITS)


# ---- stops

STOP_SPLITS = (-20, -2, -1, 0, 1, 12)
"""From the last token on: the first group's part ends far before it, right before it, with it, or
would behind it.
"""


@a_llama
@each_degree
async def test_stops_before_at_and_after_a_split(
    server: Splitting, http: httpx.AsyncClient, degree: int
) -> None:
    """By a token, which ends a request in its engine, and by a string, which the API server
    finds.
    """
    server.layout(LAYOUTS[degree])
    (whole,) = await complete(http, server.model, None)
    stops = (
        {"stop_token_ids": [whole["token_ids"][24]]},
        {"stop": re.findall(r"[a-z]{3,}", whole["text"])[8]},
    )
    for stop in stops:
        (stopped,) = await complete(http, server.model, None, **stop)
        count = len(stopped["token_ids"])
        assert 20 < count < OUTPUTS - 12
        splits = (17, *(PROMPT + count - 1 + after for after in STOP_SPLITS))
        for answer in await asyncio.gather(
            *(complete(http, server.model, at, **stop) for at in splits)
        ):
            same_choices(answer, [stopped])
        assert [stopped["stop_reason"]] in ([stop.get("stop")], stop.get("stop_token_ids"))
    server.nothing_is_left()


# ---- clients that leave

LEAVES = {
    "the prefix": ("forced-long", 701, 0),
    "before the split": ("block", 33 + 40, 3),
    "at the split": ("block", 33 + 8, 9),
    "after the split": ("block", 33 + 8, 20),
}
"""Request, split, and how many tokens its client waits for; without any it leaves at some time."""


@a_llama
@each_degree
async def test_clients_that_leave_free_blocks_and_offers(
    server: Splitting, http: httpx.AsyncClient, degree: int
) -> None:
    """Whether a part computes, is pulled, is handed over or is done; other streams go on."""
    server.layout(LAYOUTS[degree])
    others = [
        asyncio.create_task(stream(http, server.body(BY_NAME[name], BUSY[name])))
        for name in ("short", "long")
    ]

    async def leave(name: str, split: int, count: int, after_s: float) -> None:
        body = server.body(BY_NAME[name], split, cache_salt=f"{after_s}")
        if count:
            answer = await stream(http, body, leave_after=count)
            server.compare(BY_NAME[name], degree, answer)
            assert not answer.done
        else:
            await asyncio.wait([task := asyncio.create_task(stream(http, body))], timeout=after_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(
        *(leave(*which, 0.02 * number) for which in LEAVES.values() for number in range(6))
    )
    for name, other in zip(("short", "long"), others, strict=True):
        server.compare(BY_NAME[name], degree, await other)
    server.nothing_is_left()


@a_llama
@each_degree
async def test_caches_are_reset_while_requests_are_split(
    server: Splitting, http: httpx.AsyncClient, degree: int
) -> None:
    """All KV goes, where it is offered and what was pulled of it; nobody notices."""
    server.layout(LAYOUTS[degree])
    tasks = [
        asyncio.create_task(stream(http, server.body(BY_NAME[name], BUSY[name]))) for name in BUSY
    ]
    for number in range(20):
        assert (await http.post("/reset_prefix_cache?reset_running_requests=true")).json() == {
            "success": True
        }
        await asyncio.sleep(0.01 * (number % 7))
    for name, task in zip(BUSY, tasks, strict=True):
        server.compare(BY_NAME[name], degree, await task)
    server.nothing_is_left()


# ---- storms


def some_split(draw: random.Random, request: StockRequest) -> int:
    """Anywhere in the prompt, at its end or in the output, one as often as the other."""
    prompt = len(request.prompt)
    return draw.choice(
        (draw.randrange(prompt), prompt, draw.randrange(prompt, prompt + request.max_tokens))
    )


@a_llama
async def test_splits_survive_a_storm_of_switches(
    server: Splitting, http: httpx.AsyncClient
) -> None:
    """One or two begin before each switch; those of earlier ones go on, or their clients have
    left.
    """
    draw, before, tasks = random.Random(26), server.counts(), set[asyncio.Task[None]]()
    outcomes: Counter[bool] = Counter()

    async def ask(request: StockRequest, leaves: int | None) -> None:
        answer = await stream(
            http, server.body(request, some_split(draw, request)), leave_after=leaves
        )
        server.compare(request, 1, answer)
        outcomes[answer.done] += 1

    for number in range(STORM_SWITCHES):
        for request in draw.choices(STORM_REQUESTS, k=1 + number % 2):
            leaves = draw.randrange(1, request.max_tokens) if draw.random() < LEAVE_SHARE else None
            tasks.add(asyncio.create_task(ask(request, leaves)))
        await asyncio.sleep(draw.uniform(0, STORM_PAUSE_S))
        await asyncio.to_thread(server.layout, draw.choice(STORM_LAYOUTS), draw.choice(MODES))
        await asyncio.to_thread(server.check)
    await asyncio.gather(*tasks)
    made = server.counts() - before
    # how many are undone depends on how long a switch takes beside a split
    assert 10 < made["undone"] < made["prompt"] + made["output"]
    assert min(made["prompt"], made["output"], outcomes[True], outcomes[False]) > 10
    server.nothing_is_left()


@pytest.mark.parametrize("groups", LAYOUTS.values())
async def test_splits_get_by_with_little_memory(
    small_engines: Server, groups: list[list[int]]
) -> None:
    """Requests wait for blocks, are preempted while they are pulled, and end."""
    small_engines.layout(groups)
    before = sum(small_engines.metric(PULLED).values())
    draw = random.Random(27)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=small_engines.url, headers=headers, timeout=120, limits=KEEP_ALIVE
    ) as http:

        async def ask(number: int) -> None:
            prompt, outputs = draw.randrange(20, 600), draw.randrange(8, 120)
            told = {
                "force_token_ids": tokens(1000 + number, outputs),
                "split_at": draw.randrange(prompt + outputs),
            }
            fields = {
                "max_tokens": outputs,
                "temperature": 1.0,
                "ignore_eos": True,
                "vllm_xargs": told,
            }
            answer = await stream(
                http, streamed_body(small_engines.model, tokens(number, prompt), **fields)
            )
            assert answer.done and answer.tokens == list(told["force_token_ids"])

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(ask(number))
    assert sum(small_engines.metric(PULLED).values()) > before
    small_engines.until_idle()
    small_engines.check()
