"""What operators of vLLM rely on: metrics, the API key, resets of prefix caches, progress."""

import asyncio
from typing import Any

import httpx
import pytest

from harness.live import KEY, Server, wait_until
from harness.streams import begin, stream, streamed_body
from tests.deep.server.behaviour.comparisons import (
    ALONE,
    LANES,
    PROGRESS_S,
    TOGETHER,
    count_steps,
    long_request,
    post,
    prompt,
    same,
    sampling,
)

pytestmark = pytest.mark.server


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
    assert sum(prompts) == 8 * 20
    assert sum(done) == 8
    assert server.metric("vllm:num_requests_running", "engine") == {("0",): 0, ("1",): 0}


MOVES: dict[str, tuple[str | None, dict[str, int]]] = {
    "migrate": ("migrate", {}),
    "soft": ("soft", {}),
    "hard": ("hard", {}),
    "weave": ("weave", {}),
    "split": (None, {"split_at": 700}),
    "none": (None, {}),
}
"""The mode in which engines merge while prompts are computed, and where requests are split."""


@pytest.mark.parametrize("move", MOVES)
async def test_prompts_are_counted_once_however_requests_move(
    server: Server, http: httpx.AsyncClient, move: str
) -> None:
    """As each client's `usage` says, with the tokens that prefix caches had."""
    mode, extra = MOVES[move]
    salt, head = f"counted, {move}", prompt(160, 640)

    async def ask(seed: int) -> dict[str, Any]:
        tail = prompt(161 + seed, 1200) if seed else []
        fields = sampling(None, 8, extra=dict(extra) if seed else {}, cache_salt=salt)
        body = {"model": server.model, "prompt": head + tail, **fields}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def counted() -> list[int]:
        names = ("prompt_tokens_total", "prompt_tokens_cached_total")
        by_source = server.metric("vllm:prompt_tokens_by_source_total", "source")
        return [
            *(int(sum(server.metric(f"vllm:{name}").values())) for name in names),
            *(int(by_source[source,]) for source in ("local_compute", "local_cache_hit")),
        ]

    def ended() -> int:
        return int(sum(server.metric("vllm:request_success_total").values()))

    for _ in range(2):  # both engines have it
        await asyncio.gather(ask(0), ask(0))
    await asyncio.to_thread(wait_until, lambda: not server.requests("running"))
    before, count = await asyncio.to_thread(counted), await asyncio.to_thread(ended)
    asked = [asyncio.create_task(ask(1 + number)) for number in range(8)]
    await asyncio.to_thread(wait_until, lambda: server.requests("running") == len(asked))
    if mode is not None:
        await asyncio.to_thread(server.layout, TOGETHER, mode)
    usages = await asyncio.gather(*asked)
    # the engines' figures come with their outputs, which the API server counts a moment later
    await asyncio.to_thread(wait_until, lambda: ended() == count + len(asked))
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum((usage["prompt_tokens_details"] or {})["cached_tokens"] or 0 for usage in usages)
    found = [new - old for old, new in zip(before, await asyncio.to_thread(counted), strict=True)]
    assert prompts == 8 * 1840
    assert found == [prompts, hits, prompts - hits, hits]
    assert hits > 0


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
    assert answer.status_code == 200
    assert answer.json() == {"success": True}
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
    """Running requests get more steps than paused ones."""
    await asyncio.to_thread(server.layout, old)
    paused, tasks = await begin(http, [long_request(server, 120 + i) for i in range(2)])
    await asyncio.to_thread(server.layout, new, "hard")
    _, more = await begin(http, [long_request(server, 130 + i) for i in range(4)])
    async with asyncio.timeout(PROGRESS_S):
        counts, before = [len(into.tokens) for into in paused], await count_steps(http)
        while any(len(into.tokens) < count + 6 for into, count in zip(paused, counts, strict=True)):
            await asyncio.sleep(0.01)
        made = await count_steps(http) - before
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
    _, more = await begin(http, [long_request(server, 150 + i) for i in range(4)])
    order = asyncio.create_task(http.post("/flying/layout", json={"groups": ALONE, "mode": "soft"}))
    async with asyncio.timeout(PROGRESS_S):
        await tasks[0]
    assert len(paused[0].tokens) == 300
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)
    assert (await order).status_code == 200
