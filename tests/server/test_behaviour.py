"""What clients of vLLM rely on, in lane 1 and in lane 2 and across a switch, on one server of two
engines.
"""

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
from harness.live import KEEP_ALIVE, KEY, Server, wait_until
from harness.streams import (
    WORST_LOGPROB,
    Stream,
    begin,
    stream,
    streamed,
    streamed_body,
    worst_difference,
)

pytestmark = pytest.mark.server

ALONE, TOGETHER = [[0], [1]], [[0, 1]]
LANES = (1, 2)
PROGRESS_S = 60.0
LONG_TOKENS = 2000


@pytest.fixture(scope="module")
def server(two_engines: tuple[Server, str]) -> Server:
    return two_engines[0]


@pytest.fixture(autouse=True)
def at_rest(server: Server) -> Iterator[None]:
    """Each test begins with two engines alone, and leaves nothing behind."""
    server.layout(ALONE)
    yield
    server.until_idle()
    server.check()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=120, limits=KEEP_ALIVE
    ) as client:
        yield client


def prompt(seed: int, count: int) -> list[int]:
    """Tokens of printable ASCII: after broken UTF-8 vLLM's text begins with the prompt's."""
    draw = random.Random(seed)
    return [draw.randrange(32, 127) for _ in range(count)]


def sampling(
    seed: int | None, max_tokens: int, degree: int | None = None, **fields: Any
) -> dict[str, Any]:
    """Fields of a request at temperature 1."""
    extra = fields.pop("extra", {}) | ({} if degree is None else {"tp_degree": degree})
    xargs = {"vllm_xargs": extra} if extra else {}
    return {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        **xargs,
        **fields,
    }


def post(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(path, json={"model": server.model, **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def same(ours: Stream, reference: Stream) -> None:
    assert ours.tokens == reference.tokens
    assert ours.finish_reason == reference.finish_reason
    assert worst_difference(ours.logprobs, reference.logprobs) <= WORST_LOGPROB


# ---- aborts


@pytest.mark.parametrize("degree", LANES)
async def test_client_that_leaves_frees_its_blocks_and_disturbs_nobody(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    stay = [
        streamed_body(server.model, prompt(i, 40 + i), **sampling(i, 40, degree)) for i in range(3)
    ]
    leave = streamed_body(server.model, prompt(9, 900), **sampling(9, 1000, degree))
    reference = [await stream(http, body) for body in stay]
    server.until_idle()
    before = server.status()["engines"]
    leaving = asyncio.create_task(stream(http, leave, leave_after=4))
    staying = [asyncio.create_task(stream(http, body)) for body in stay]
    left = await leaving
    assert 4 <= len(left.tokens) < 100
    for ours, theirs in zip(await asyncio.gather(*staying), reference, strict=True):
        same(ours, theirs)
    server.until_idle()
    after = server.status()["engines"]
    for old, new in zip(before, after, strict=True):
        unused = [
            sum(engine["lent_blocks"].values()) + engine["free_blocks"] for engine in (old, new)
        ]
        assert unused == [old["blocks"] - 1] * 2, (
            "every block but the null block is free or lent, for prefix caches"
        )
    if degree == 1:
        assert [engine["free_blocks"] for engine in after] == [
            engine["free_blocks"] for engine in before
        ]


async def test_many_clients_leave_at_every_moment(server: Server, http: httpx.AsyncClient) -> None:
    bodies = [
        streamed_body(server.model, prompt(i, 30 * i + 5), **sampling(i, 60, LANES[i % 2]))
        for i in range(12)
    ]
    reference = await asyncio.gather(*(stream(http, body) for body in bodies[:2]))

    async def leave(body: dict[str, Any], after_s: float) -> None:
        task = asyncio.create_task(stream(http, body))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    staying = [asyncio.create_task(stream(http, body)) for body in bodies[:2]]
    await asyncio.gather(*(leave(body, 0.03 * i) for i, body in enumerate(bodies[2:])))
    for ours, theirs in zip(await asyncio.gather(*staying), reference, strict=True):
        same(ours, theirs)


# ---- sampling


@pytest.mark.parametrize("degree", LANES)
def test_stop_tokens_and_strings(server: Server, degree: int) -> None:
    tokens = prompt(20, 30)
    whole = server.complete(tokens, **sampling(21, 40, degree))
    stop = whole["token_ids"][12]
    first = whole["token_ids"].index(stop)
    by_token = server.complete(tokens, **sampling(21, 40, degree, stop_token_ids=[stop]))
    assert by_token["token_ids"] == whole["token_ids"][: first + 1]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", stop)
    word = re.findall(r"[a-z]{3,}", whole["text"])[2]
    by_string = server.complete(tokens, **sampling(21, 40, degree, stop=[word]))
    assert by_string["text"] == whole["text"][: whole["text"].index(word)]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", word)


@pytest.mark.parametrize("degree", LANES)
def test_three_choices_are_three_seeds(server: Server, degree: int) -> None:
    tokens = prompt(30, 50)
    fields = sampling(31, 20, degree, n=3, return_token_ids=True)
    choices = post(server, "/v1/completions", prompt=tokens, **fields)["choices"]
    alone = [
        server.complete(tokens, **sampling(31 + i, 20, 3 - degree))["token_ids"] for i in range(3)
    ]
    assert [choice["token_ids"] for choice in sorted(choices, key=lambda c: c["index"])] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_seed_decides_the_tokens_in_every_lane(server: Server) -> None:
    runs = [
        server.complete(prompt(40, 20), **sampling(41, 30, degree))["token_ids"]
        for degree in (1, 2, None, 2, 1)
    ]
    assert all(run == runs[0] for run in runs)
    assert server.complete(prompt(40, 20), **sampling(42, 30, 2))["token_ids"] != runs[0]


async def test_unseeded_streams_are_consistent_on_all_members(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Members that sampled differently would write different tokens into their parts of the KV
    cache.
    """
    server.layout(TOGETHER)
    jobs = [(prompt(50 + i, 10 + 20 * i), degree) for degree in LANES for i in range(8)]
    bodies = [
        streamed_body(server.model, tokens, **sampling(None, 60, degree)) for tokens, degree in jobs
    ]
    answers = await asyncio.gather(*(stream(http, body) for body in bodies))
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    forced = [
        streamed_body(
            server.model,
            tokens,
            **sampling(None, 60, 3 - degree, extra={"force_token_ids": answer.tokens}),
        )
        for (tokens, degree), answer in zip(jobs, answers, strict=True)
    ]
    for ours, theirs in zip(
        answers, await asyncio.gather(*(stream(http, body) for body in forced)), strict=True
    ):
        same(ours, theirs)


def test_logprobs_of_alternatives_and_of_the_prompt(server: Server) -> None:
    fields = {
        "prompt": prompt(60, 70),
        "logprobs": 3,
        "prompt_logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    choices = [
        post(server, "/v1/completions", **fields, **sampling(61, 12, degree))["choices"][0]
        for degree in LANES
    ]
    for choice in choices:
        assert all(3 <= len(top) <= 4 for top in choice["logprobs"]["top_logprobs"])
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == 70
        assert all(2 <= len(top) <= 3 for top in choice["prompt_logprobs"][1:])
    one, two = choices
    for ours, theirs in zip(
        one["logprobs"]["top_logprobs"], two["logprobs"]["top_logprobs"], strict=True
    ):
        close(ours, theirs)
    for ours, theirs in zip(one["prompt_logprobs"][1:], two["prompt_logprobs"][1:], strict=True):
        close(
            *({token: entry["logprob"] for token, entry in top.items()} for top in (ours, theirs))
        )


def close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys()
    assert (
        worst_difference([ours[token] for token in ours], [theirs[token] for token in ours])
        <= WORST_LOGPROB
    )


@pytest.mark.parametrize("degree", LANES)
def test_one_token(server: Server, degree: int) -> None:
    answer = server.complete([5], **sampling(1, 1, degree))
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (1, "length")


def test_empty_prompt_is_refused_as_by_stock_vllm(server: Server) -> None:
    """The answer was copied from vLLM 0.32.0's own server."""
    answer = server.http.post(
        "/v1/completions", json={"model": server.model, "prompt": "", **sampling(1, 4, 2)}
    )
    message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    error = {"message": message, "type": "BadRequestError", "param": "prompt", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": error})


# ---- structured output

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": ["Berlin", "Paris", "Rome"]}},
    "regex": {"structured_outputs": {"regex": "[abc]{20}-[0-9]{20}"}},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
}


def valid(name: str, text: str) -> None:
    if name == "choice":
        assert text in FORMATS["choice"]["structured_outputs"]["choice"]
    elif name == "regex":
        assert re.fullmatch(FORMATS["regex"]["structured_outputs"]["regex"], text)
    else:
        found = json.loads(text)
        assert found.keys() == {"colour", "sure"}
        assert found["colour"] in ("red", "green", "blue")


async def test_structured_output_in_both_lanes_and_across_a_switch(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Grammars of several requests advance in step with their tokens, beside requests without
    one.
    """

    def body(name: str, degree: int | None) -> dict[str, Any]:
        fields = sampling(70, 150, degree, **FORMATS[name]) | {"ignore_eos": False}
        return streamed_body(server.model, prompt(71, 25), **fields)

    reference = {name: await stream(http, body(name, 1)) for name in FORMATS}
    for name, answer in reference.items():
        assert answer.finish_reason == "stop"
        valid(name, answer.text)
    free = streamed_body(server.model, prompt(72, 60), **sampling(72, 80))
    free_alone = await stream(http, free)
    for mode in ("weave", "hard"):
        server.layout(ALONE)
        jobs = [(name, degree) for name in FORMATS for degree in (None, *LANES)]
        tasks = [asyncio.create_task(stream(http, body(name, degree))) for name, degree in jobs]
        beside = asyncio.create_task(stream(http, free))
        await asyncio.sleep(0.15)
        await asyncio.to_thread(server.layout, TOGETHER, mode)
        after_switch = {
            name: asyncio.create_task(stream(http, body(name, None))) for name in FORMATS
        }
        for (name, _), task in zip(jobs, tasks, strict=True):
            same(await task, reference[name])
        for name, task in after_switch.items():
            same(await task, reference[name])
        same(await beside, free_alone)


def test_structured_output_in_a_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "Which colour?"}]
    texts = []
    for degree in LANES:
        fields = sampling(73, 150, degree, **FORMATS["response_format"]) | {"ignore_eos": False}
        answer = post(server, "/v1/chat/completions", messages=messages, **fields)
        texts.append(answer["choices"][0]["message"]["content"])
        valid("json", texts[-1])
    assert texts[0] == texts[1]


# ---- chat, and OpenAI's own client

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How do birds fly?"},
]


@pytest.mark.parametrize("degree", LANES)
async def test_streamed_chat_with_usage(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    fields = sampling(80, 30, degree, messages=MESSAGES)
    whole = post(server, "/v1/chat/completions", **fields)
    body = {
        "model": server.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    text, usage, reasons = "", None, []
    async with streamed(http, body, EventStream(json.loads), "/v1/chat/completions") as events:
        async for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reasons.append(choice["finish_reason"])
    assert text == whole["choices"][0]["message"]["content"]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert usage is not None
    assert usage["completion_tokens"] == 30
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("degree", LANES)
def test_openai_client(server: Server, degree: int) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        extra = {"ignore_eos": True, "vllm_xargs": {"tp_degree": degree}}
        fields = {
            "model": server.model,
            "max_tokens": 20,
            "seed": 5,
            "temperature": 1.0,
            "extra_body": extra,
        }
        whole = client.chat.completions.create(messages=MESSAGES, **fields)
        events = client.chat.completions.create(messages=MESSAGES, stream=True, **fields)
        text = "".join(event.choices[0].delta.content or "" for event in events)
        assert text == whole.choices[0].message.content
        plain = client.completions.create(prompt="Once upon a time", stream=True, **fields)
        assert (
            "".join(event.choices[0].text for event in plain)
            == client.completions.create(prompt="Once upon a time", **fields).choices[0].text
        )
        assert [model.id for model in client.models.list()] == [server.model]
        with pytest.raises(openai.BadRequestError, match="tp_degree=3"):
            client.completions.create(
                prompt="x", **fields | {"extra_body": {"vllm_xargs": {"tp_degree": 3}}}
            )


# ---- operation


async def test_metrics_of_both_engines(server: Server, http: httpx.AsyncClient) -> None:
    counted = ("generation_tokens", "prompt_tokens", "request_success")
    before = [server.metric(f"vllm:{name}_total", "engine") for name in counted]
    for groups, degree in ((ALONE, 1), (TOGETHER, 2)):
        await asyncio.to_thread(server.layout, groups)
        bodies = [
            streamed_body(server.model, prompt(90 + i, 20), **sampling(None, 50, degree))
            for i in range(4)
        ]
        answers = await asyncio.gather(*(stream(http, body) for body in bodies))
        assert all(answer.done for answer in answers)
    # the engines' figures come with their outputs, which the API server counts a moment later
    ended = [sum(old.values()) + 8 for old in before[2:]]
    await asyncio.to_thread(
        wait_until,
        lambda: [sum(server.metric("vllm:request_success_total", "engine").values())] == ended,
    )
    await asyncio.to_thread(
        wait_until, lambda: not any(server.metric("vllm:num_requests_running", "engine").values())
    )
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "e2e_request_latency_seconds_sum"):
        assert server.metric(f"vllm:{name}", "engine").keys() == {("0",), ("1",)}
    after = [server.metric(f"vllm:{name}_total", "engine") for name in counted]
    generated, prompts, done = (
        [new[engine,] - old.get((engine,), 0) for engine in "01"]
        for old, new in zip(before, after, strict=True)
    )
    assert generated == [2 * 50 + 4 * 50, 2 * 50], "a group's requests count for its leader"
    assert (sum(prompts), sum(done)) == (8 * 20, 8)
    assert server.metric("vllm:num_requests_running", "engine") == {("0",): 0, ("1",): 0}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/flying/status"),
        ("GET", "/flying/switches"),
        ("POST", "/flying/layout"),
        ("POST", "/flying/check"),
    ],
)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", "Bearer sécret"]
)
def test_admin_routes_ask_for_the_key(
    server: Server, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    with httpx.Client(base_url=server.url) as stranger:
        answer = stranger.request(method, path, headers=headers, json={"groups": TOGETHER})
    assert answer.status_code == 401
    assert server.status()["layout"] == ALONE


@pytest.mark.parametrize("degree", LANES)
def test_prefix_caches_are_reset(server: Server, degree: int) -> None:
    def cached() -> int:
        usage = post(server, "/v1/completions", prompt=prompt(100, 300), **sampling(1, 2, degree))[
            "usage"
        ]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    cached()
    assert cached() >= 256
    server.until_idle()
    answer = server.http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert cached() == 0
    assert cached() >= 256


async def test_prefix_caches_are_not_reset_under_requests_but_by_force(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Requests go on with the same tokens, also when they are reset while a step of their group is
    ordered.
    """
    bodies = [
        streamed_body(server.model, prompt(110 + d, 40), **sampling(110, 120, d)) for d in LANES
    ]
    reference = [await stream(http, body) for body in bodies]
    for _ in range(2):
        _, tasks = await begin(http, bodies)
        assert (await http.post("/reset_prefix_cache")).json() == {"success": False}
        for number in range(100):
            assert (await http.post("/reset_prefix_cache?reset_running_requests=true")).json() == {
                "success": True
            }
            await asyncio.sleep(0.003 * (number % 7))
        for task, theirs in zip(tasks, reference, strict=True):
            same(await task, theirs)


@pytest.mark.parametrize(("old", "new"), [(ALONE, TOGETHER), (TOGETHER, ALONE)])
async def test_paused_requests_make_progress(
    server: Server, http: httpx.AsyncClient, old: list[list[int]], new: list[list[int]]
) -> None:
    """Who runs steps more often than who is paused. By how much: tests/engine/test_arbiter.py."""
    await asyncio.to_thread(server.layout, old)
    paused, tasks = await begin(http, [_long(server, 120 + i) for i in range(2)])
    await asyncio.to_thread(server.layout, new, "hard")
    _, more = await begin(http, [_long(server, 130 + i) for i in range(4)])
    async with asyncio.timeout(PROGRESS_S):
        counts, before = [len(into.tokens) for into in paused], await _steps(http)
        while any(len(into.tokens) < count + 6 for into, count in zip(paused, counts, strict=True)):
            await asyncio.sleep(0.01)
        made = await _steps(http) - before
    assert made[len(new[0])] > made[len(old[0])] > 0
    for task in (*tasks, *more):
        task.cancel()
    await asyncio.gather(*tasks, *more, return_exceptions=True)


async def test_a_soft_switch_does_not_wait_for_paused_requests(
    server: Server, http: httpx.AsyncClient
) -> None:
    """They would get a step a second, as long as new requests keep the present lane busy: here for
    minutes.
    """
    paused, tasks = await begin(
        http, [streamed_body(server.model, prompt(140, 20), **sampling(140, 300))]
    )
    await asyncio.to_thread(server.layout, TOGETHER, "hard")
    _, more = await begin(http, [_long(server, 150 + i) for i in range(4)])
    order = asyncio.create_task(http.post("/flying/layout", json={"groups": ALONE, "mode": "soft"}))
    async with asyncio.timeout(PROGRESS_S):
        await tasks[0]
    assert len(paused[0].tokens) == 300
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    assert (await order).status_code == 200


async def _steps(http: httpx.AsyncClient) -> Counter[int]:
    """Steps that engines have led so far, by lane."""
    engines = (await http.get("/flying/status")).json()["engines"]
    made: Counter[int] = Counter()
    for engine in engines:
        made.update({int(size): count for size, count in engine["steps"].items()})
    return made


def _long(server: Server, seed: int) -> dict[str, Any]:
    return streamed_body(server.model, prompt(seed, 20), **sampling(seed, LONG_TOKENS))


# ---- pauses, as vLLM's dev mode has them


async def _begun(
    server: Server, http: httpx.AsyncClient, degree: int, count: int, tokens: int
) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """Streams in a lane, with tokens."""
    bodies = [
        streamed_body(server.model, prompt(200 + i, 30), **sampling(i, tokens, degree))
        for i in range(count)
    ]
    return await begin(http, bodies)


async def _paused(http: httpx.AsyncClient) -> bool:
    paused: bool = (await http.get("/is_paused")).json()["is_paused"]
    return paused


@pytest.mark.parametrize("degree", LANES)
async def test_kept_requests_stop_and_go_on_when_resumed(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    """With the same tokens."""
    reference = await stream(
        http, streamed_body(server.model, prompt(200, 30), **sampling(0, 200, degree))
    )
    (into,), (task,) = await _begun(server, http, degree, 1, 200)
    assert (await http.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert await _paused(http)
    await asyncio.sleep(0.1)
    before = len(into.tokens), await _steps(http)
    await asyncio.sleep(0.5)
    assert (len(into.tokens), await _steps(http)) == before
    assert 0 < len(into.tokens) < 200
    await http.post("/resume")
    assert not await _paused(http)
    same(await task, reference)


@pytest.mark.parametrize("degree", LANES)
async def test_a_pause_waits_for_what_runs_and_holds_what_comes(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    _, (task,) = await _begun(server, http, degree, 1, 100)
    await http.post("/pause?mode=wait")
    assert (await task).finish_reason == "length"
    later = asyncio.create_task(
        stream(http, streamed_body(server.model, prompt(1, 9), **sampling(1, 3, degree)))
    )
    await asyncio.sleep(0.5)
    assert not later.done()
    await http.post("/resume")
    assert len((await later).tokens) == 3


@pytest.mark.parametrize("degree", LANES)
async def test_a_pause_ends_all_requests_by_default(
    server: Server, http: httpx.AsyncClient, degree: int
) -> None:
    """Those that wait in the task pool too, behind a switch that waits for the others."""
    present, other = (ALONE, TOGETHER) if degree == 1 else (TOGETHER, ALONE)
    await asyncio.to_thread(server.layout, present)
    streams, tasks = await _begun(server, http, degree, 4, 1900)
    order = asyncio.create_task(
        http.post("/flying/layout", json={"groups": other, "mode": "sequential"})
    )
    held = Stream()
    tasks.append(asyncio.create_task(stream(http, _long(server, 300), into=held)))
    await asyncio.to_thread(wait_until, lambda: server.requests("waiting"))
    await http.post("/pause")
    await asyncio.gather(*tasks)
    assert (await order).status_code == 200, "nothing is left to wait for"
    assert {into.finish_reason for into in streams} == {"abort"}
    assert (held.done, held.tokens) == (True, []), "vLLM has no chunk for what had no token"
    assert server.status()["requests"] == {"running": 0, "waiting": 0}
    await http.post("/resume")


async def test_sleep_is_a_pause_and_no_more(server: Server, http: httpx.AsyncClient) -> None:
    refused = await http.post("/sleep?level=1")
    assert refused.status_code == 400
    assert "level=1: must be 0; sleep mode cannot be served by Flying Serving yet" in refused.text
    assert not await _paused(http)
    assert (await http.post("/sleep?level=0")).status_code == 200
    assert await _paused(http)
    assert (await http.post("/wake_up?tags=scheduling")).status_code == 200
    assert not await _paused(http)
