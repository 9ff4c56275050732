"""Deadlines: a request that has not begun by then is late, once, wherever it waits."""

from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.deadlines import Deadlines
from tests.unit.controller.queued import state


@given(
    requests=st.lists(
        st.tuples(st.none() | st.floats(0.1, 5.0), st.none() | st.floats(0.0, 6.0)), max_size=30
    ),
    ticks=st.lists(st.floats(0.0, 7.0), max_size=10).map(sorted),
)
def test_late_requests_are_reported_once(
    requests: list[tuple[float | None, float | None]], ticks: list[float]
) -> None:
    """Each with its deadline and when it begins; all arrive at 0."""
    deadlines, expired = Deadlines(), list[str]()
    for number, (deadline_s, _) in enumerate(requests):
        deadlines.add(state(number, deadline_s=deadline_s))
    events = [(time_s, "") for time_s in ticks] + [
        (at, f"r{n}") for n, (_, at) in enumerate(requests) if at is not None
    ]
    for time_s, begun in sorted(events):
        if begun:
            deadlines.drop(begun)
        else:
            expired += [one.request_id for one in deadlines.take_expired(time_s)]
    expected = {
        f"r{number}"
        for number, (deadline_s, begins_s) in enumerate(requests)
        if deadline_s is not None
        and any(deadline_s <= at and (begins_s is None or at <= begins_s) for at in ticks)
    }
    assert len(expired) == len(set(expired))
    assert set(expired) == expected


def test_ended_requests_leave_no_entries() -> None:
    """However far off their deadlines are."""
    deadlines = Deadlines()
    for number in range(3):
        deadlines.add(state(number, deadline_s=1e6))
    for number in range(10, 5000):
        deadlines.add(state(number, deadline_s=1e6))
        deadlines.drop(f"r{number}")
        assert len(deadlines._heap) <= 8
    assert [one.request_id for one in deadlines.take_expired(2e6)] == ["r0", "r1", "r2"]
    assert len(deadlines) == 0
