"""What is kept of a trace with two switches: what is near them, on one clock."""

from typing import Any

import pytest

from benchmarks.client import Stream
from benchmarks.traced_switch import NEAR_MS, near
from flying_serving.observe.tracing.events import (
    TracedPull,
    TracedStep,
    engine_row,
    pull,
    server_row,
    step,
)

FIRST_S, LAST_S = 10.0, 10.5


def events(switches: int = 2) -> list[dict[str, Any]]:
    """A trace of two engines, in which engine 1 steps at some times."""
    server, engine = server_row(7), engine_row(1, 7, 9)
    made = [*server.names(), *engine.names()]
    for at_s in (FIRST_S, LAST_S)[:switches]:
        made.append(server.span("a -> b", "cutover", at_s, at_s + 0.001, {"cutover_ms": 1.0}))
    for at_s, group in ((1.0, [1]), (FIRST_S - 0.01, [1]), (FIRST_S + 0.1, [0, 1]), (11.0, [1])):
        made.append(step(engine, TracedStep(group, 1, 1, 1, 0, 8), at_s, at_s + 0.004, 0.0))
    made.append(pull(engine, TracedPull([0], 0, 64, 2), FIRST_S + 0.02, FIRST_S + 0.03))
    return made


def test_what_is_near_the_switches_is_kept() -> None:
    streams = [Stream(9.0, [9.5, FIRST_S, LAST_S + 0.05, 12.0]), Stream(1.0, [2.0])]
    kept = near(events(), streams)
    assert kept["switches"] == [
        {"what": "engines join", "at_ms": pytest.approx(NEAR_MS), "cutover_ms": 1.0},
        {"what": "engines part", "at_ms": pytest.approx(NEAR_MS + 500), "cutover_ms": 1.0},
    ]
    assert kept["steps"] == [
        {"engine": 1, "size": size, "at_ms": pytest.approx(NEAR_MS + at_ms), "took_ms": 4.0}
        for size, at_ms in ((1, -10.0), (2, 100.0))
    ]
    assert kept["pulls"] == [{"engine": 1, "at_ms": pytest.approx(NEAR_MS + 20), "took_ms": 10.0}]
    assert kept["tokens_ms"] == [[pytest.approx(NEAR_MS), pytest.approx(NEAR_MS + 550)], []]


def test_a_trace_without_both_switches_is_refused() -> None:
    with pytest.raises(RuntimeError, match="1 switches are in the trace, not 2"):
        near(events(1), [])
