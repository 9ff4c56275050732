"""Replay against a mock server in its own process: every way that a request can end, open loop,
lateness.
"""

import asyncio
import time
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from flying_deploy.ports import ReservedPort
from flying_lab.bench.bodies import Bodies, body_of
from flying_lab.bench.client import Replay, Target, clocks_together
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import Served, measure, probe, too_long
from flying_lab.errors import BenchError
from flying_lab.results.lag import LagMeter
from flying_lab.results.results import Results
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.prompts import Prompts
from harness import mock_server as mock

CLOCKS_S = 0.001
"""How exactly two clocks are read together."""
ENDS = {
    "ok": (7, "ok"),
    "refused": (mock.REFUSE, "failed"),
    "broken": (mock.BREAK, "failed"),
    "error": (mock.ERROR, "failed"),
    "short": (mock.SHORT, "unfinished"),
    "hang": (mock.HANG, "unfinished"),
    "no done": (mock.NO_DONE, "unfinished"),
}
"""Ways to end: the token that asks the mock for it, and the status of the record."""


def workload(*arrivals: float, tokens: int = 5) -> Workload:
    """Return requests at these times."""
    return Workload("test", 1, tuple(Request(i, at, 8, tokens) for i, at in enumerate(arrivals)))


def bodies(work: Workload, firsts: list[int]) -> list[bytes]:
    """Return bodies whose first token says what the mock is to do."""
    return [
        msgspec.json.encode(body_of(request, mock.MODEL, [first, 1, 2]))
        for request, first in zip(work.requests, firsts, strict=True)
    ]


async def replayed(
    url: str, work: Workload, firsts: list[int] | None = None, timeout_s: float = 60.0
) -> Replay:
    """Return a replay that has run."""
    one = Replay(work, bodies(work, firsts or [7] * len(work.requests)), Target(url), timeout_s)
    await one.run()
    return one


@pytest.mark.deep
async def test_every_end_is_told_apart_and_none_is_dropped(mock_url: str) -> None:
    replay = await replayed(
        mock_url, workload(*[0.0] * len(ENDS)), [first for first, _ in ENDS.values()], timeout_s=2.0
    )
    found = dict(zip(ENDS, replay.records, strict=True))
    assert {name: record.status for name, record in found.items()} == {
        name: end for name, (_, end) in ENDS.items()
    }
    assert found["ok"].error is None and found["ok"].queue_s == 0.0125
    assert found["refused"].error == '400: {"error": {"message": "prompt is refused"}}'
    assert found["refused"].http_status == 400
    assert "ClientPayloadError" in (found["broken"].error or "")
    assert "engine died" in (found["error"].error or "")
    assert found["short"].error == "4 of 5 tokens received, finish_reason length"
    assert found["hang"].error == "took longer than 2 s"
    assert found["no done"].error == "the stream ended without [DONE] after 5 of 5 tokens"
    assert [sum(record.token_counts) for record in found.values()] == [5, 0, 2, 2, 4, 4, 5]
    assert replay.done == replay.sent == len(ENDS)
    for record in replay.records:
        assert record.sent_s is not None and record.end_s is not None
        assert record.sent_s >= record.request.arrival_s
        times = [record.sent_s, record.first_byte_s or record.sent_s, *record.token_s, record.end_s]
        assert times == sorted(times)


async def test_requests_are_sent_before_earlier_ones_are_answered(mock_url: str) -> None:
    """All requests are sent though none of them ever ends."""
    work = workload(*[index * 0.005 for index in range(20)])
    replay = Replay(work, bodies(work, [mock.HANG] * 20), Target(mock_url), 60.0)
    running = asyncio.create_task(replay.run())
    while replay.tokens < 20 * 4:
        await asyncio.sleep(0.001)
    assert replay.sent == 20
    assert replay.done == 0
    replay.stop()
    await running


async def test_each_token_has_its_time() -> None:
    """Three gaps of 0.1 s lie between sending and the fourth token."""
    with mock.running(token_gap_s=0.1) as url:
        replay = await replayed(url, workload(0.0, tokens=4))
    record = replay.records[0]
    assert record.sent_s is not None and len(record.token_s) == 4
    assert record.token_s[-1] - record.sent_s >= 0.29
    assert record.token_s[0] < record.token_s[-1]


@pytest.mark.deep
async def test_times_fit_the_clock_on_the_wall_of_a_server() -> None:
    """The server notes a request between sending and the first token, by the other clock."""
    with mock.running(token_gap_s=0.01) as url:
        replay = await replayed(url, workload(0.0, 0.05, 0.1), [7, 8, 9])
        seen = {body["prompt"][0]: body["wall_s"] for body in httpx.get(url + "/seen").json()}
    for first, record in zip([7, 8, 9], replay.records, strict=True):
        assert record.sent_s is not None
        assert (
            record.sent_s - CLOCKS_S
            <= seen[first] - replay.started_wall_s
            <= record.token_s[0] + CLOCKS_S
        )
    assert abs(replay.wall_drift_s()) < CLOCKS_S


async def test_each_request_says_that_no_server_is_there() -> None:
    with ReservedPort() as port:
        replay = await replayed(port.url, workload(0.0, 0.0))
    assert [record.status for record in replay.records] == ["failed", "failed"]
    assert all("Connect" in (record.error or "") for record in replay.records)


async def test_stopped_replay_keeps_its_records_and_counts_the_rest(mock_url: str) -> None:
    """One request is done, one under way, one not sent yet."""
    work = workload(0.0, 0.0, 1000.0)
    replay = Replay(work, bodies(work, [7, mock.HANG, 7]), Target(mock_url), 60.0)
    running = asyncio.create_task(replay.run())
    while replay.tokens < 9:
        await asyncio.sleep(0.001)
    replay.stop()
    await running
    assert [record.status for record in replay.records] == ["ok", "unfinished", "unfinished"]
    assert replay.records[1].error == "cut off: the replay was stopped"
    assert replay.records[2].error == "not sent"
    assert replay.records[2].sent_s is None


async def test_requests_carry_their_fields_and_the_key() -> None:
    """Priority and degree only where they are set."""
    plain = Request(0, 0.0, 8, 3)
    work = Workload("fields", 1, (plain, Request(1, 0.0, 8, 3, priority=-2, tp_degree=4)))
    with mock.running() as url:
        target = Target(url, "secret")
        with Bodies(work, mock.MODEL, Prompts(work, range(200, 300)), {"temperature": 0.5}) as made:
            replay = Replay(work, made, target, 60.0)
            await replay.run()
        seen = sorted(
            httpx.get(url + "/seen").json(), key=lambda body: body.get("priority", 0), reverse=True
        )
    assert {record.status for record in replay.records} == {"ok"}
    common = {
        "model": mock.MODEL,
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.5,
        "authorization": "bearer secret",
    }
    prompts = [body.pop("prompt") for body in seen]
    assert all(body.pop("wall_s") > 0 for body in seen)
    assert seen == [common, {**common, "priority": -2, "vllm_xargs": {"tp_degree": 4}}]
    assert all(len(prompt) == 8 and 200 <= min(prompt) <= max(prompt) < 300 for prompt in prompts)
    assert "secret" not in repr(target)


async def test_a_large_body_is_sent_whole(mock_url: str) -> None:
    """Beyond the size from which aiohttp wants a file."""
    work = workload(0.0)
    body = msgspec.json.encode(body_of(work.requests[0], mock.MODEL, [7] * 600_000))
    assert len(body) > 2**20
    replay = Replay(work, [body], Target(mock_url), 60.0)
    await replay.run()
    assert replay.records[0].status == "ok", replay.records[0].error


def test_bodies_are_in_the_order_of_the_workload() -> None:
    """Each is the body of its request, and making them is reported."""
    work = workload(0.0, 1.0, 2.0)
    counts: list[int] = []
    prompts = Prompts(work, range(200, 300))
    with Bodies(work, "m", prompts, made=counts.append) as made:
        assert len(made) == 3 and counts == [1, 2, 3]
        for position, request in enumerate(work.requests):
            body = msgspec.json.decode(made[position])
            assert body == body_of(request, "m", prompts.token_ids(request).tolist())


def test_measure_gives_results(mock_url: str) -> None:
    """From a workload to a table, with the server's model and the client's lag."""
    target = Target(mock_url)
    served = probe(target, BenchOptions())
    assert served == Served(mock.MODEL, 4096)
    work = workload(0.0, 0.01, 0.02)
    found = measure(work, target, served, BenchOptions())
    assert isinstance(found, Results) and found.ok.all()
    assert found.floats("output_tokens").tolist() == [5.0, 5.0, 5.0]
    assert found.floats("prompt_tokens").tolist() == [8.0, 8.0, 8.0]
    assert found.run.model == mock.MODEL
    assert found.run.url == mock_url
    assert found.run.seed == 1
    assert found.run.duration_s >= 0.02 and found.run.max_send_lag_ms >= found.run.p99_send_lag_ms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BenchOptions(model="other"), "serves mock-model, not other"),
        (BenchOptions(token_ids=(mock.REFUSE, 199)), "token ids 100 and 199.*--token-ids"),
    ],
)
def test_a_server_that_cannot_serve_it_is_found_out_before_the_replay(
    mock_url: str, options: BenchOptions, message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        probe(Target(mock_url), options)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "nonsense"])
def test_a_url_without_a_server_is_named(url: str) -> None:
    with pytest.raises(BenchError, match=url):
        probe(Target(url), BenchOptions())


def test_requests_that_are_too_long_are_counted() -> None:
    """Where the server says how much it takes."""
    work = workload(0.0, 1.0)
    long = work.having(replace(request, prompt_tokens=4092) for request in work.requests[:1])
    assert too_long(work, Served("m", 4096)) == 0
    assert too_long(long, Served("m", 4096)) == 1
    assert too_long(long, Served("m", None)) == 0


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    """The meter sees the event loop's pauses and what was sent late."""
    meter = LagMeter()
    meter.start()
    for _ in range(5):
        await asyncio.sleep(0.02)
        time.sleep(0.05)
    await asyncio.sleep(0.02)
    meter.stop()
    meter.sent(0.002)
    lag = meter.result()
    assert lag.max_loop_lag_ms > 20 and lag.behind
    assert lag.max_send_lag_ms == pytest.approx(2.0)
    assert lag.p99_client_lag_ms == lag.p99_loop_lag_ms


def test_a_meter_without_values_is_not_late() -> None:
    lag: Any = LagMeter().result()
    assert lag.p99_client_lag_ms == 0.0
    assert lag.behind is False


# ---- clocks


def test_a_wait_between_two_readings_does_not_set_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all pairs but one, the process waits for a processor between the readings."""
    now = [100.0]
    waits = [0.3, 0.2, 1e-6, 0.4, 0.5]

    def wall() -> float:
        at = now[0] + 1e9
        now[0] += waits.pop(0)
        return at

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "time", wall)
    monotonic_s, wall_s = clocks_together()
    assert wall_s - monotonic_s == pytest.approx(1e9, abs=1e-5)
    assert not waits
