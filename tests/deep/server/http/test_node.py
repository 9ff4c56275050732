"""A live node as routers see it: its load in a burst, and how it drains."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.live import Server, wait_until
from tests.stock.requests import tokens

pytestmark = pytest.mark.server

BURST = 24
SERIES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two engines that run four requests each."""
    with Server("llama", 2, "--max-num-seqs=4", "--node-metrics") as live:
        yield live


def load(server: Server, path: str = "/load") -> dict[str, float]:
    found: dict[str, float] = server.http.get(path).raise_for_status().json()
    return found


def series(server: Server, name: str) -> float:
    """The one sample of a metric that has no label but the model's name."""
    families = text_string_to_metric_families(server.http.get("/metrics").raise_for_status().text)
    (sample,) = [one for family in families for one in family.samples if one.name == name]
    assert set(sample.labels) == {"model_name"}
    return sample.value


def body(server: Server, number: int, max_tokens: int) -> dict[str, object]:
    return {
        "model": server.model,
        "prompt": list(tokens(number, 40)),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def completed(lines: list[str]) -> int:
    """Output tokens of a stream that has ended well, as it says itself."""
    *_, usage, done = (line for line in lines if line)
    assert done == "data: [DONE]"
    count: int = json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]
    return count


def test_load_seen_by_routers_in_a_burst_is_the_controllers(server: Server) -> None:
    """While all of them run, in JSON and in the metrics, and again when all have ended."""

    async def stream(client: httpx.AsyncClient, number: int, began: asyncio.Event) -> int:
        async with client.stream(
            "POST", "/v1/completions", json=body(server, number, 400)
        ) as answer:
            began.set()
            return completed([line async for line in answer.aiter_lines()])

    async def burst() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            began = [asyncio.Event() for _ in range(BURST)]
            streams = [asyncio.ensure_future(stream(client, n, one)) for n, one in enumerate(began)]
            await asyncio.gather(*(one.wait() for one in began))
            asked, polled = await asyncio.gather(client.get("/load"), client.get("/get_load"))
            # asks engines, which answer between two steps
            status = await client.get("/flying/status")
            counted = status.json()["requests"]
            for found in (asked.json(), polled.json(), status.json()["load"]):
                assert found["load"] == found["server_load"] == BURST == sum(counted.values())
                assert found["requests_running"] == counted["running"] == 8
                assert found["requests_waiting"] == counted["waiting"] == BURST - 8
            shown = await asyncio.to_thread(lambda: [series(server, name) for name in SERIES])
            assert shown[:2] == [8, BURST - 8]
            return await asyncio.gather(*streams)

    assert asyncio.run(burst()) == [400] * BURST
    wait_until(lambda: load(server)["load"] == 0)
    wait_until(lambda: [series(server, name) for name in SERIES] == [0, 0, 0])


def test_node_reports_the_tokens_that_it_holds(server: Server) -> None:
    """As many tokens as the status says that a group of the layout, and of any layout, may hold."""
    found, status = load(server), server.status()
    capacity = status["capacity_tokens"]
    assert found["longest_request_tokens"] == min(2048, capacity["1"])
    assert found["longest_request_tokens_any_layout"] == min(2048, capacity["2"])
    assert found["kv_tokens_free"] == 2 * capacity["1"]
    assert found["layout"] == status["layout"] == [[0], [1]]
    assert not found["degraded"]
    assert series(server, "flying:node_kv_tokens_free") == found["kv_tokens_free"]


def test_draining_node_finishes_its_requests(server: Server) -> None:
    """What has begun ends with all its tokens; new requests get 503 and are told when to come
    again.
    """
    assert server.http.get("/ready").status_code == 200
    with server.http.stream("POST", "/v1/completions", json=body(server, 1, 300)) as answer:
        lines = answer.iter_lines()
        next(lines)
        drained = server.http.post("/flying/drain", json={}).raise_for_status().json()
        assert drained == {"draining": True, "ready_to_stop": False, "requests": 1}
        refused = server.http.post("/v1/completions", json=body(server, 2, 3))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert completed(list(lines)) == 300
    wait_until(lambda: server.http.get("/flying/drain").json()["ready_to_stop"])
    assert load(server)["draining"]
    assert server.http.delete("/flying/drain").json() == {
        "draining": False,
        "ready_to_stop": False,
        "requests": 0,
    }
    assert server.http.get("/ready").status_code == 200
    assert server.http.post("/v1/completions", json=body(server, 2, 3)).status_code == 200
