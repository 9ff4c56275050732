"""Records and results for tests."""

from array import array
from typing import get_args

from hypothesis import strategies as st

from flying_lab.results.record import Record, Status
from flying_lab.results.results import Results, Run
from flying_lab.workload.model import Request

LAG = {
    "p99_send_lag_ms": 1.0,
    "max_send_lag_ms": 2.0,
    "p99_loop_lag_ms": 3.0,
    "max_loop_lag_ms": 4.0,
}
RUN = Run("w", "drawn", 3, "http://there", "m", 1.7e9, 100.0, **LAG)


def record(index: int, sent_s: float, token_s: list[float], **fields: object) -> Record:
    """Return a request that got one token at each of these times and all that it asked for."""
    request = Request(index, sent_s, 10, max(1, len(token_s)))
    end_s = token_s[-1] if token_s else sent_s
    made = Record(request, "ok", None, sent_s, sent_s, end_s, 200, "length")
    made.token_s, made.token_counts = array("d", token_s), array("i", [1] * len(token_s))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def results(*records: Record) -> Results:
    """Return the results of these requests."""
    return Results.of(RUN, records)


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Return any records, in the order of arrival."""
    found = []
    for index, arrival in enumerate(
        sorted(draw(st.lists(st.floats(0, 100), min_size=1, max_size=8)))
    ):
        request = Request(
            index,
            arrival,
            draw(st.integers(1, 99)),
            draw(st.integers(1, 99)),
            priority=draw(st.integers(-1, 1)),
            phase=draw(st.sampled_from([None, "low", "burst"])),
            deadline_s=draw(st.sampled_from([None, 0.5, 5.0])),
        )
        one = Record(request)
        if draw(st.booleans()):
            one.sent_s = arrival + draw(st.floats(0, 1))
            one.status = draw(st.sampled_from(get_args(Status)))
            gaps = draw(
                st.lists(st.floats(0, 3), min_size=1 if one.status == "ok" else 0, max_size=5)
            )
            at = one.sent_s
            for gap in gaps:
                at += gap
                one.token_s.append(at)
                one.token_counts.append(draw(st.integers(1, 4)))
            one.end_s = at
            one.queue_s = draw(st.sampled_from([None, 0.25]))
            one.error = None if one.status == "ok" else "why"
        found.append(one)
    return found
