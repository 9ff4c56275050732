"""What operators of vLLM rely on: metrics, the API key, resets of prefix caches, progress."""

import asyncio

import httpx
import pytest

from harness.live import KEY, Server, wait_until
from harness.streams import begin, stream, streamed_body
from tests.deep.server.behaviour.requests import (
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
