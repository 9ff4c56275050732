"""What the demo says of `auto`: derived from hand-made summaries and switch records, whichever side is better."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from flying_serving.demo.gains import decisions_table, gains_table, phase_lines, switch_lines, verdicts
from flying_serving.demo.traffic import SEED, TRAFFIC, _Feed
from flying_serving.workload.model import Request, Workload
from flying_serving.workload.synth import synthesise

BEGAN_S = 1000.0
TTFT = st.floats(1.0, 1e5)


def figures(ttft_ms: float | None, tokens_per_s: float | None = 100.0) -> dict[str, Any]:
    """Return one phase of a summary."""
    return {
        "mean_ttft_ms": ttft_ms,
        "p90_ttft_ms": ttft_ms,
        "median_tpot_ms": 30.0,
        "output_throughput": tokens_per_s,
        "output_throughput_during": tokens_per_s,
    }


def summaries(**ttft_ms: float | None) -> dict[str, Any]:
    """Return summaries with one phase, by system."""
    return {name.replace("_", "-"): {**figures(ms), "phases": {"low": figures(ms)}} for name, ms in ttft_ms.items()}


def switch(**changes: Any) -> dict[str, Any]:
    """Return what the server tells of a switch that was made 2 s after the replay began."""
    record = {
        "number": 1,
        "time": BEGAN_S + 2.0,
        "from": [[0], [1], [2], [3]],
        "to": [[0, 1], [2, 3]],
        "preempt": "weave",
        "reason": "load: 0.50 requests/s, 0 waiting",
        "predicted_gain_request_s": 7.25,
        "predicted_cost_request_s": 0.5,
        "requests_in_flight": 3,
        "cutover_ms": 12.5,
        "drain_ms": 400.0,
        "worst_token_gap_ms": 50.0,
        "problem": None,
    }
    return record | changes


def text(drawn: RenderableType, *, colours: bool = False) -> str:
    """Return what a table looks like."""
    console = Console(file=io.StringIO(), width=120, force_terminal=colours, color_system="standard")
    console.print(drawn)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


@given(auto=TTFT, dp=TTFT, tp=TTFT)
def test_verdict_names_the_better_fixed_layout_whichever_it_is(auto: float, dp: float, tp: float) -> None:
    """And the ratio is to that one, also where `auto` is worse."""
    low, _ = verdicts(summaries(auto=auto, static_dp=dp, static_tp=tp))
    best = "static-tp" if tp < dp else "static-dp"
    assert low.startswith(f"low: {best} has the lower mean TTFT")
    assert low.endswith(f"{auto / min(dp, tp):.2f}x that")


def test_verdict_on_all_requests_has_both_ratios_to_both() -> None:
    """In the order of the systems."""
    *_, whole = verdicts(summaries(auto=300, static_dp=600, static_tp=200))
    assert whole == (
        "all: auto has 0.50x static-dp's mean TTFT, 1.00x static-dp's tokens/s, "
        "1.50x static-tp's mean TTFT, 1.00x static-tp's tokens/s"
    )


@pytest.mark.parametrize("missing", ["auto", "static_dp", "static_tp"])
def test_what_no_request_has_shown_is_not_judged(missing: str) -> None:
    """A system that completed nothing in a phase has no figure and wins nothing."""
    found = summaries(**({"auto": 1.0, "static_dp": 2.0, "static_tp": 3.0} | {missing: None}))
    low, whole = verdicts(found)
    assert ("no request" in low) == (missing == "auto")
    assert "- static" in whole
    assert "-" in text(gains_table(found))


def test_ratios_are_coloured_by_what_is_better() -> None:
    """Less time and more tokens are green; what differs by little has no colour."""
    found = {"auto": figures(50, 300), "a": figures(100, 290), "b": figures(20, 100), "c": figures(100, 600)}
    shown = text(gains_table(found), colours=True)
    green, red = "\x1b[32m", "\x1b[31m"
    assert f"{green}0.50x" in shown
    assert f"{red}2.50x" in shown
    assert f"{green}3.00x" in shown
    assert f"{red}0.50x" in shown
    assert f"{green}1.03x" not in shown


def test_phases_begin_with_their_first_request() -> None:
    """And last until the next one begins."""
    arrivals = ((0.5, "low"), (4.0, "low"), (10.5, "burst"), (11.0, "burst"), (12.0, "low"))
    workload = Workload("", 0, tuple(Request(i, at, 1, 1, phase=phase) for i, (at, phase) in enumerate(arrivals)))
    assert phase_lines(workload) == [
        (0.5, "   0.5 s  low: 2 requests in 10 s"),
        (10.5, "  10.5 s  burst: 2 requests in 2 s"),
        (12.0, "  12.0 s  low: 1 requests in 0 s"),
    ]


def test_a_switch_is_told_when_it_is_made() -> None:
    """One that still waits has no time; one that a request cannot do without has no gain."""
    (told,) = switch_lines([switch(), switch(number=2, time=0.0, cutover_ms=None)], BEGAN_S)
    assert told == (
        2.0,
        "   2.0 s  1+1+1+1 → 2+2 by weave, cutover 12.5 ms; load: 0.50 requests/s, 0 waiting; "
        "predicted gain 7.2, cost 0.5",
    )
    ((_, needed),) = switch_lines([switch(predicted_gain_request_s=None)], BEGAN_S)
    assert needed.endswith("waiting")


def test_switches_in_a_table() -> None:
    """Those that still wait too, without a time; none at all is said in words."""
    shown = text(decisions_table([switch(), switch(time=0.0, cutover_ms=None, drain_ms=None)], BEGAN_S))
    assert "2.0 s" in shown
    assert "-1000.0 s" not in shown
    assert decisions_table([], BEGAN_S) == "auto made no switch"


def test_each_event_is_printed_once_and_not_before_its_time() -> None:
    """In the order of time."""
    console = Console(file=io.StringIO(), width=120)
    workload = Workload("", 0, (Request(0, 0.0, 1, 1, phase="low"), Request(1, 5.0, 1, 1, phase="burst")))
    feed = _Feed(console, "http://nowhere.invalid", "auto", workload)
    for elapsed_s in (1.0, 3.0, 3.5, 6.0):
        feed.show([switch()] if elapsed_s > 2 else [], BEGAN_S, elapsed_s)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("s ")[0].strip() for line in lines] == ["0.0", "2.0", "5.0"]


def test_the_workload_is_low_burst_low() -> None:
    """A burst between two quiet times, at several times their rate."""
    lines = [line for _, line in phase_lines(synthesise(TRAFFIC, SEED))]
    assert [line.split()[2] for line in lines] == ["low:", "burst:", "low:"]
    before, burst, after = (int(line.split()[3]) for line in lines)
    assert burst / TRAFFIC.burst_s > 3 * max(before, after) / TRAFFIC.low_s
