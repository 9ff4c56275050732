"""What an operator sees: metrics, health, models, the status and the record of switches."""

import re
from collections import Counter

import pytest

from flying_serving.observe.metrics.table import TABLE
from harness.live import Server, wait_until
from tests.smoke.four_requests import OUTPUTS, PROMPT_TOKENS, REQUESTS, answers_as_stock

pytestmark = pytest.mark.server

COUNTED = {
    "vllm:request_success_total": len(REQUESTS),
    "vllm:prompt_tokens_total": PROMPT_TOKENS,
    "vllm:generation_tokens_total": OUTPUTS * len(REQUESTS),
}


def test_metrics_of_the_table_are_there(two: Server) -> None:
    """Each with its type, and no other of ours."""
    text = two.http.get("/metrics").raise_for_status().text
    shown = re.findall(r"^# TYPE (flying:\w+) (\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted((family.name, family.kind) for family in TABLE)


async def test_requests_are_counted(two: Server) -> None:
    """An engine's figures come with its outputs, and the server counts them a moment later."""

    def counts() -> Counter[str]:
        return Counter({name: int(sum(two.metric(name).values())) for name in COUNTED})

    before = counts()
    await answers_as_stock(two)
    wait_until(lambda: counts() - before == COUNTED, counts)


def test_switches_are_counted_and_recorded(two: Server) -> None:
    def count() -> float:
        labels = ("from_layout", "to_layout", "reason", "mode")
        switches = two.metric("flying:switches_total", *labels)
        return switches.get(("1+1", "2", "operator", "hard"), 0)

    before = count()
    switch = two.layout([[0, 1]], "hard")
    assert count() == before + 1
    assert two.metric("flying:layout_info", "layout") == {("2",): 1}
    (recorded,) = [one for one in two.switches() if one["number"] == switch["number"]]
    assert recorded["to"] == [[0, 1]] and recorded["reason"] == "ordered by an operator"


def test_status_names_layout_engines_and_capacity(two: Server) -> None:
    status = two.status()
    assert status["layout"] == [[0], [1]] and status["policy"] == "manual"
    assert status["requests"] == {"running": 0, "waiting": 0}
    assert [engine["engine"] for engine in status["engines"]] == [0, 1]
    assert not status["degraded"]
    assert status["capacity_tokens"]["2"] > status["capacity_tokens"]["1"]


def test_a_server_that_drains_is_healthy_but_not_ready(two: Server) -> None:
    def codes() -> list[int]:
        return [two.http.get(path).status_code for path in ("/health", "/ready")]

    assert codes() == [200, 200]
    assert two.http.post("/flying/drain", json={}).json()["ready_to_stop"]
    try:
        assert codes() == [200, 503]
        assert two.post([1, 2, 3], 4).status_code == 503
    finally:
        two.http.delete("/flying/drain")
    assert codes() == [200, 200]
    assert two.post([1, 2, 3], 4).status_code == 200


def test_models_are_listed(two: Server) -> None:
    (model,) = two.http.get("/v1/models").raise_for_status().json()["data"]
    assert (model["id"], model["max_model_len"]) == (two.model, 2048)
