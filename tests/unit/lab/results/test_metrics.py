"""Metrics against numbers worked out by hand, and against a slow, plain calculation on drawn
records.
"""

import math
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given

from flying_lab.results import metrics, timeline
from flying_lab.results.metrics import summarise
from flying_lab.results.record import Record
from flying_lab.results.timeline import Stretch
from flying_lab.workload.model import Request
from flying_serving.slo import Slo
from tests.unit.lab.bench.tables import record, records, results

TWO = results(
    record(0, 1.0, [1.5, 1.6, 1.8]), record(1, 2.0, [4.0]), record(2, 3.0, [], status="failed")
)


def test_latencies_by_hand() -> None:
    """0.5 s to the first token, 0.15 s for each of the two after it."""
    assert metrics.ttft_s(TWO)[:2] == pytest.approx([0.5, 2.0])
    assert metrics.e2el_s(TWO)[:2] == pytest.approx([0.8, 2.0])
    assert metrics.tpot_s(TWO)[0] == pytest.approx(0.15)
    assert np.isnan(metrics.tpot_s(TWO)[1:]).all() and np.isnan(metrics.ttft_s(TWO)[2])
    assert metrics.itl_s(TWO, TWO.ok) == pytest.approx([0.1, 0.2])


def test_the_summary_by_hand() -> None:
    """Names as `vllm bench serve` has them; the failed request is counted, and counts in no
    latency.
    """
    summary = summarise(TWO, Slo(ttft=500.0001, tpot=150.0001))
    assert {
        name: summary[name] for name in ("num_prompts", "completed", "failed", "unfinished")
    } == {
        "num_prompts": 3,
        "completed": 2,
        "failed": 1,
        "unfinished": 0,
    }
    assert summary["duration"] == 100.0
    assert summary["total_input_tokens"] == 20 and summary["total_output_tokens"] == 4
    assert summary["request_throughput"] == pytest.approx(0.02)
    assert summary["output_throughput"] == pytest.approx(0.04)
    assert summary["total_token_throughput"] == pytest.approx(0.24)
    assert summary["request_goodput"] == pytest.approx(0.01)
    assert summary["slo_attainment"] == pytest.approx(1 / 3)
    assert summary["mean_ttft_ms"] == summary["median_ttft_ms"] == pytest.approx(1250)
    assert summary["std_ttft_ms"] == pytest.approx(750)
    assert summary["p99_ttft_ms"] == pytest.approx(500 + 0.99 * 1500)
    assert summary["mean_tpot_ms"] == summary["p90_tpot_ms"] == pytest.approx(150)
    assert summary["mean_itl_ms"] == pytest.approx(150)
    assert summary["mean_queue_time_ms"] is None
    assert summary["max_concurrent_requests"] == 2
    assert summary["max_output_tokens_per_s"] == 3
    assert "phases" not in summary and "priorities" not in summary


def test_several_tokens_in_one_event() -> None:
    """TPOT counts tokens, ITL counts events, as in vLLM."""
    one = record(0, 0.0, [1.0, 2.0])
    one.token_counts[1] = 3
    made = results(one)
    assert metrics.tpot_s(made) == pytest.approx([1 / 3])
    assert metrics.itl_s(made, made.ok) == pytest.approx([1.0])
    assert timeline.tokens_per_s(made).tolist() == [0, 1, 3]


@given(found=records())
def test_a_plain_calculation_agrees(found: list[Record]) -> None:
    """Means and medians over completed requests, one by one."""
    made, slo = results(*found), Slo(ttft=1000, e2el=4000)
    summary = summarise(made, slo)
    done = [one for one in found if one.status == "ok"]
    ttft = [one.token_s[0] - one.sent_s for one in done if one.sent_s is not None]
    e2el = [one.token_s[-1] - one.sent_s for one in done if one.sent_s is not None]
    tokens = [one.output_tokens for one in done]
    tpot = [(e - t) / (n - 1) for e, t, n in zip(e2el, ttft, tokens, strict=True) if n > 1]
    itl = [b - a for one in done for a, b in zip(one.token_s, one.token_s[1:], strict=False)]
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl)):
        if values:
            assert summary[f"mean_{name}_ms"] == pytest.approx(fmean(values) * 1e3, abs=1e-6)
            assert summary[f"median_{name}_ms"] == pytest.approx(median(values) * 1e3, abs=1e-6)
        else:
            assert summary[f"mean_{name}_ms"] is None
    kept = sum(t * 1e3 <= 1000 and e * 1e3 <= 4000 for t, e in zip(ttft, e2el, strict=True))
    assert summary["request_goodput"] == pytest.approx(kept / 100)
    assert summary["total_output_tokens"] == sum(tokens)
    assert (
        summary["completed"] + summary["failed"] + summary["unfinished"]
        == summary["num_prompts"]
        == len(found)
    )
    assert sum(one["num_prompts"] for one in summary.get("priorities", {}).values()) in (
        0,
        len(found),
    )
    assert timeline.tokens_per_s(made).sum() == sum(sum(one.token_counts) for one in found)


@given(found=records())
def test_concurrency_begins_and_ends_with_the_requests(found: list[Record]) -> None:
    """Never below 0, at the end 0, at most as many as were sent."""
    times, counts = timeline.concurrency(results(*found))
    sent = sum(one.sent_s is not None for one in found)
    assert len(times) == 2 * sent and (np.diff(times) >= 0).all()
    assert counts.min(initial=0) >= 0
    assert counts.max(initial=0) <= sent
    assert not len(counts) or counts[-1] == 0


def phased(index: int, at: float, phase: str | None, token_s: list[float]) -> Record:
    """Return a request of a phase."""
    return record(
        index, at, token_s, request=Request(index, at, 10, max(1, len(token_s)), phase=phase)
    )


def test_phases() -> None:
    """A phase lasts from its first arrival to the next phase's; what comes during it counts for
    it.
    """
    made = results(
        phased(0, 0.0, "low", [1.0, 11.0]),
        phased(1, 5.0, "low", [6.0]),
        phased(2, 10.0, "burst", [12.0]),
        phased(3, 12.0, "burst", [13.0]),
        phased(4, 14.0, "low", [15.0]),
        phased(5, 15.0, "low", [16.0]),
    )
    low, burst = Stretch("low", 0.0, 10.0), Stretch("burst", 10.0, 14.0)
    assert timeline.stretches(made) == [low, burst, Stretch("low", 14.0, 15.0)]
    phases = summarise(made)["phases"]
    assert list(phases) == ["low", "burst"]
    assert [phases[name]["duration"] for name in phases] == [11.0, 4.0]
    assert [phases[name]["num_prompts"] for name in phases] == [4, 2]
    assert phases["burst"]["output_throughput"] == pytest.approx(2 / 4)
    assert phases["burst"]["output_throughput_during"] == pytest.approx(3 / 4)
    assert phases["burst"]["mean_ttft_ms"] == pytest.approx(1500)


def test_a_phase_of_one_request_has_no_rates() -> None:
    """It took no time."""
    phases = summarise(results(phased(0, 0.0, "low", [1.0])))["phases"]
    assert phases["low"]["output_throughput"] is None and phases["low"][
        "mean_ttft_ms"
    ] == pytest.approx(1000)


def test_several_priorities_are_told_apart() -> None:
    urgent = record(0, 0.0, [1.0], request=Request(0, 0.0, 10, 1, priority=-1))
    summary = summarise(results(urgent, record(1, 1.0, [4.0])))
    assert list(summary["priorities"]) == ["-1", "0"]
    assert summary["priorities"]["-1"]["mean_ttft_ms"] == pytest.approx(1000)


def test_reasons_are_counted() -> None:
    """The most frequent first; what is complete has none."""
    errors = ["refused", "took long", "took long", None]
    summary = summarise(
        results(*(record(index, 0.0, [1.0], error=error) for index, error in enumerate(errors)))
    )
    assert list(summary["error_counts"].items()) == [("took long", 2), ("refused", 1)]


def test_deadlines_count_from_the_arrival() -> None:
    """A request that was sent after its arrival has less time left."""
    request = Request(0, 0.0, 10, 1, deadline_s=2.0)
    early = record(0, 0.5, [1.9], request=request)
    second = record(0, 0.5, [2.1], request=request)
    assert metrics.deadlines_kept(results(early, second)).tolist() == [True, False]
    assert summarise(results(early, second))["deadline_attainment"] == 0.5


def test_one_token_keeps_any_limit_on_tpot_as_in_vllm() -> None:
    assert metrics.good(TWO, Slo(tpot=0.0)).tolist() == [False, True, False]


def test_empty_replay_has_no_values() -> None:
    """No value is invented for a replay in which nothing came."""
    summary = summarise(results(Record(Request(0, 0.0, 1, 1))))
    assert summary["unfinished"] == 1 and summary["mean_e2el_ms"] is None
    assert summary["max_concurrent_requests"] == 0
    assert not any(isinstance(value, float) and math.isnan(value) for value in summary.values())
