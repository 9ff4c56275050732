"""Events: whatever happens, they have the keys and types of the format, and spans keep their
order.
"""

import json
from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.groups import aligned_group
from flying_serving.observe.tracing.events import (
    TracedStep,
    clock,
    dropped,
    engine_row,
    microseconds,
    order,
    server_row,
    step,
)
from tests.unit.observe.tracing.reading import check, overlaps

ROW = engine_row(2, 100, 102)
TIMES = st.floats(min_value=0, max_value=1e8)
COUNTS = st.integers(min_value=0, max_value=1 << 40)


@given(times=st.lists(TIMES, min_size=2), size=st.sampled_from([1, 2, 4]))
def test_steps_one_after_another_do_not_overlap(times: list[float], size: int) -> None:
    """Whole microseconds keep the order, however short the steps are, and lose at most one."""
    times.sort()
    group = list(aligned_group(2, size))
    spans = [
        step(ROW, TracedStep(group, i, 1, 1, 0, 0), a, b, 0.0)
        for i, (a, b) in enumerate(pairwise(times), 1)
    ]
    assert overlaps(spans) == []
    for span, (began_s, ended_s) in zip(spans, pairwise(times), strict=True):
        check(span)
        assert span["dur"] == pytest.approx((ended_s - began_s) * 1e6, abs=1.01)


@given(tokens=COUNTS, requests=COUNTS, prefill=COUNTS, context=COUNTS, waited_s=TIMES, at_s=TIMES)
def test_a_step_says_what_was_in_it(
    tokens: int, requests: int, prefill: int, context: int, waited_s: float, at_s: float
) -> None:
    """And goes through JSON as it is."""
    span = step(
        ROW, TracedStep([2, 3], 7, tokens, requests, prefill, context), at_s, at_s + 0.5, waited_s
    )
    check(span)
    assert json.loads(json.dumps(span)) == span
    assert span["name"] == "group 2,3"
    assert span["ph"] == "X"
    assert span["pid"] == 100
    assert span["tid"] == 102
    assert span["args"] == {
        "lane": 2,
        "group": [2, 3],
        "step": 7,
        "tokens": tokens,
        "requests": requests,
        "prefill_tokens": prefill,
        "context_tokens": context,
        "parallelism": "tensor",
        "waited_ms": pytest.approx(waited_s * 1e3, abs=1e-3),
    }


def test_rows_are_named_and_sorted() -> None:
    """The server's first, then the engines, all in the frame of the server's process."""
    engines = [engine_row(engine, 100, 101 + engine) for engine in range(4)]
    events = [event for row in (server_row(100), *engines) for event in row.names()]
    for event in events:
        check(event)
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    order_of = {
        event["tid"]: event["args"]["sort_index"]
        for event in events
        if event["name"] == "thread_sort_index"
    }
    assert [names[tid] for tid in sorted(order_of, key=order_of.__getitem__)] == [
        "switches",
        "engine 0",
        "engine 1",
        "engine 2",
        "engine 3",
    ]
    assert {event["pid"] for event in events} == {100}


@given(at_s=TIMES, unix_s=st.floats(min_value=1.7e9, max_value=4e9))
def test_instants(at_s: float, unix_s: float) -> None:
    """Orders, losses and the clock, which leads back to Unix time."""
    taken, missed, now = (
        order(ROW, (2, 3), "weave", at_s),
        dropped(ROW, 3, at_s),
        clock(server_row(100), at_s, unix_s),
    )
    for event in (taken, missed, now):
        check(event)
        assert event["ph"] == "i"
        assert event["ts"] == microseconds(at_s)
    assert taken["name"] == "to 2,3"
    assert taken["args"] == {"group": [2, 3], "mode": "weave"}
    assert missed["args"] == {"count": 3}
    assert now["args"]["unix_s_at_ts_0"] + now["ts"] / 1e6 == pytest.approx(unix_s, abs=1e-5)
    assert datetime.fromisoformat(now["args"]["utc"]).timestamp() == pytest.approx(unix_s, abs=1e-5)
