"""Policy `auto` in a live server: long requests, requests that outgrow their engine, urgent ones,
and too many.

Each of two engines has 64 blocks of 32 tokens beside vLLM's null block, so 2,048 tokens; together
they have 4,096. A group's steps last four times as long (`harness/paced.py`), which makes it the
worse layout for every load, so one is formed for a need alone.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flying_lab.tiny_models.tokenizer import EOS
from harness.live import BLOCK_BYTES, Server, wait_until
from harness.paced import Pace, pace
from harness.streams import WORST_LOGPROB, worst_difference
from tests.stock.requests import tokens

pytestmark = pytest.mark.server

MOST_TOKENS = 2500
PACED = pace(single=Pace(0.008), pair=Pace(0.032))
SETTINGS = (
    "--policy=auto",
    f"--max-model-len={MOST_TOKENS}",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=2",
    "--max-waiting-requests=3",
    f"--kv-cache-memory-bytes={65 * BLOCK_BYTES}",
    "--no-enable-prefix-caching",
)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("llama", 2, *SETTINGS, preamble=PACED) as live:
        yield live


def formed_since(server: Server, count: int) -> list[str]:
    """Why groups of both engines were formed after the first `count` switches."""
    return [switch["reason"] for switch in server.switches()[count:] if switch["to"] == [[0, 1]]]


@pytest.fixture
def apart(server: Server) -> int:
    """How many switches there have been once the engines are apart and nothing runs."""
    server.until_idle()
    wait_until(lambda: server.status()["layout"] == [[0], [1]], server.switches)
    return len(server.switches())


def test_step_costs_are_known_from_the_start(server: Server) -> None:
    cost = server.status()["step_cost"]
    assert set(cost) == {"1", "2"}
    assert all(lane["fixed_s"] + lane["sequence_s"] > 0 for lane in cost.values())


def test_an_operators_layout_is_refused(server: Server) -> None:
    answer = server.http.post("/flying/layout", json={"groups": [[0, 1]]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "policy"
    assert "'auto'" in answer.json()["error"]["message"]


def test_a_prompt_too_long_for_an_engine_is_served_by_a_group(server: Server, apart: int) -> None:
    answer = server.post(tokens(1, 2300), 60)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 60
    reasons = formed_since(server, apart)
    assert len(reasons) == 1 and "context" in reasons[0]


def test_a_large_max_tokens_forms_no_group(server: Server, apart: int) -> None:
    """The request ends at its first token, as far as a client can tell before."""
    stops = {"ignore_eos": False, "stop_token_ids": list(range(512))}
    answer = server.post(tokens(3, 100), MOST_TOKENS - 101, **stops)
    assert answer.status_code == 200, answer.text
    assert len(server.switches()) == apart


def test_a_request_longer_than_expected_goes_on_in_a_group(server: Server, apart: int) -> None:
    """To its `max_tokens`, with the tokens and logprobs that a group gives from the start."""
    prompt, asks = tokens(4, 1900), {"ignore_eos": False, "logit_bias": {str(EOS): -100.0}}
    longer = server.post(prompt, 300, vllm_xargs={"expected_tokens": 20}, **asks)
    assert longer.status_code == 200, longer.text
    reasons = formed_since(server, apart)
    assert len(reasons) == 1 and "context" in reasons[0]
    choice = longer.json()["choices"][0]
    assert len(choice["token_ids"]) == 300
    assert choice["finish_reason"] == "length"
    whole = server.post(prompt, 300, 2, **asks).json()["choices"][0]
    assert choice["token_ids"] == whole["token_ids"]
    ours, theirs = (c["logprobs"]["token_logprobs"] for c in (choice, whole))
    assert worst_difference(ours, theirs) <= WORST_LOGPROB


def test_a_request_too_long_for_its_engine_migrates_to_a_group(server: Server, apart: int) -> None:
    """To the end of the model's length, with the tokens and logprobs that a group gives from the
    start.
    """
    prompt = tokens(2, 1900)
    migrated = server.post(prompt, MOST_TOKENS - 1900)
    assert migrated.status_code == 200, migrated.text
    reasons = formed_since(server, apart)
    assert len(reasons) == 1 and "context" in reasons[0]
    choice = migrated.json()["choices"][0]
    assert len(choice["token_ids"]) == MOST_TOKENS - 1900
    assert choice["finish_reason"] == "length"
    whole = server.post(prompt, MOST_TOKENS - 1900, 2).json()["choices"][0]
    assert choice["token_ids"] == whole["token_ids"]
    ours, theirs = (c["logprobs"]["token_logprobs"] for c in (choice, whole))
    assert worst_difference(ours, theirs) <= WORST_LOGPROB


def test_urgent_request_does_not_wait_for_earlier_ones(server: Server, apart: int) -> None:
    """Requests have been long of late. All slots are taken by long ones, two more wait, and the
    urgent one gets a group and ends before any.
    """
    with ThreadPoolExecutor(8) as threads:
        usual = [threads.submit(server.post, tokens(70 + i, 50), 600) for i in range(7)]
        assert all(request.result(WAIT_S).status_code == 200 for request in usual)
        long = [threads.submit(server.post, tokens(10 + i, 50), 600, 1) for i in range(6)]
        wait_until(lambda: server.requests("running") == 4, server.status)
        wait_until(lambda: server.requests("waiting") == 2, server.status)
        urgent = threads.submit(server.post, tokens(20, 50), 5, priority=-1)
        answer = urgent.result(WAIT_S)
        assert answer.status_code == 200, answer.text
        assert not any(request.done() for request in long)
        assert all(request.result(WAIT_S).status_code == 200 for request in long)
    reasons = formed_since(server, apart)
    assert len(reasons) == 1 and "priority" in reasons[0]


def test_more_than_may_wait_are_told_when_to_come_back(server: Server) -> None:
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(server.post, tokens(30 + i, 50), 300) for i in range(12)]
        answers = [request.result(WAIT_S) for request in asked]
    codes = sorted({answer.status_code for answer in answers})
    assert codes == [200, 429]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("--max-waiting-requests" in answer.json()["error"]["message"] for answer in refused)


def test_an_urgent_request_is_taken_when_no_other_may_wait(server: Server) -> None:
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(server.post, tokens(30 + i, 50), 600, 1) for i in range(12)]
        wait_until(
            lambda: any(one.done() and one.result().status_code == 429 for one in asked),
            server.status,
        )
        urgent = server.post(tokens(20, 50), 5, priority=-1)
        refused = server.post(tokens(20, 50), 5, priority=1)
        assert urgent.status_code == 200, urgent.text
        assert refused.status_code == 429, refused.text
        assert not all(one.done() for one in asked)


def test_a_queue_deadline_ends_the_wait(server: Server) -> None:
    with ThreadPoolExecutor(8) as threads:
        long = [threads.submit(server.post, tokens(50 + i, 50), 800, 1) for i in range(4)]
        wait_until(lambda: server.requests("running") == 4, server.status)
        expired = server.post(tokens(60, 50), 5, vllm_xargs={"queue_deadline_s": 0.2})
        assert expired.status_code == 504, expired.text
        assert "queue_deadline_s" in expired.json()["error"]["message"]
        assert all(request.result(WAIT_S).status_code == 200 for request in long)


@pytest.mark.parametrize("deadline", [0, -1, "soon", 1e9])
def test_a_wrong_queue_deadline_is_refused(server: Server, deadline: Any) -> None:
    answer = server.post(tokens(61, 5), 5, vllm_xargs={"queue_deadline_s": deadline})
    assert answer.status_code == 400, answer.text


def test_server_is_idle_and_sound_after_all_tests(server: Server) -> None:
    server.until_idle()
    server.check()
