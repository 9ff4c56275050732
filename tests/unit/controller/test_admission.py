"""Admission: bounds of what waits, in requests, tokens and time, for urgent requests and others."""

import math
from dataclasses import replace

import pytest

from flying_serving.controller.admission import Admission, Pace
from flying_serving.controller.loads import Loads
from flying_serving.controller.pool import TaskPool
from flying_serving.controller.queue_slots import CallSlots
from flying_serving.controller.requests import ALONE, Origin
from flying_serving.controller.settings import Settings
from flying_serving.errors import PoolFull
from tests.unit.controller.model_settings import settings
from tests.unit.controller.queued import AGING_S, state

LEAST = 4
"""`max_num_seqs` of `settings()`."""


def admission(count: int, chosen: Settings, *, priority: int = 0) -> Admission:
    """With so many requests of 10 tokens in the pool."""
    pool = TaskPool(AGING_S)
    for number in range(count):
        pool.add(state(number, priority=priority))
    return Admission(chosen, pool, Loads(), tuple)


def ticked(
    pace: Pace, seconds: float, per_s: float, *, waits: bool = True, at_s: float = 0.0
) -> None:
    """So many requests leave a second, in ticks of 0.1 s."""
    due = 0.0
    for number in range(round(seconds * 10)):
        due += per_s / 10
        while due >= 1.0:
            pace.dispatched()
            due -= 1.0
        pace.tick(at_s + number / 10, waits=waits)


def test_the_limit_is_named_when_it_is_reached() -> None:
    """And not before."""
    chosen = settings(most_waiting=2)
    admission(1, chosen).check()
    full = admission(2, chosen)
    with pytest.raises(PoolFull, match=r"^2 requests wait already \(--max-waiting-requests\)$"):
        full.check()
    assert full.refused == 1


def test_waiting_prompt_tokens_are_bounded_for_any_number_of_requests() -> None:
    chosen = replace(settings(), most_waiting_tokens=30)
    admission(2, chosen).check()
    with pytest.raises(PoolFull, match=r"^30 prompt tokens wait already \(--max-waiting-tokens\)$"):
        admission(3, chosen).check()


def test_urgent_requests_are_taken_in_a_flood_of_others_up_to_a_bound() -> None:
    chosen = settings(most_waiting=100)
    flooded = admission(100, chosen)
    assert flooded.problem() is not None
    flooded.check(urgent=True)
    urgent = admission(100, chosen, priority=-1)
    urgent.check()
    with pytest.raises(PoolFull, match="100 requests"):
        urgent.check(urgent=True)


def test_prompts_of_urgent_requests_may_wait_as_well_up_to_a_bound() -> None:
    chosen = replace(settings(), most_waiting_tokens=1000)
    flooded = admission(100, chosen)
    assert flooded.problem() is not None
    flooded.check(urgent=True)
    with pytest.raises(PoolFull, match="2000 prompt tokens"):
        admission(200, chosen).check(urgent=True)


def test_requests_in_engine_queues_count_as_waiting_without_limits() -> None:
    """Beyond what a group runs at a time."""
    chosen = replace(settings("manual", capped=False, most_waiting=3), most_waiting_tokens=75)
    loads = Loads()
    found = Admission(chosen, TaskPool(AGING_S), loads, tuple)
    for number in range(LEAST + 3):
        found.check()
        loads.add(state(number), (0,), 15.0)
    with pytest.raises(PoolFull, match="3 requests wait already"):
        found.check()
    loads.add(state(9), (1,), 15.0)
    with pytest.raises(PoolFull, match="80 prompt tokens wait already"):
        Admission(replace(chosen, most_waiting=9), TaskPool(AGING_S), loads, tuple).check()


def test_urgent_requests_count_urgent_ones_alone_in_engine_queues() -> None:
    loads = Loads()
    for number in range(LEAST + 5):
        loads.add(state(number, priority=-1 if number < LEAST + 2 else 0), (0,), 15.0)
    for most_waiting, waits in ((2, False), (3, True)):
        chosen = settings("manual", capped=False, most_waiting=most_waiting)
        found = Admission(chosen, TaskPool(AGING_S), loads, tuple).problem(urgent=True)
        assert (found is None) == waits


def test_requests_that_would_wait_too_long_are_refused() -> None:
    """By the pace at which others leave, once that is known; as many as can run may wait at any
    pace.
    """
    chosen = replace(settings(), most_wait_s=5.0)
    for count, per_s, refused in (
        (60, 10.0, True),
        (40, 10.0, False),
        (LEAST, 0.5, True),
        (LEAST - 1, 0.5, False),
    ):
        found = admission(count, chosen)
        assert found.problem() is None
        ticked(found.pace, 20.0, per_s)
        assert (found.problem() is not None) is refused, (count, per_s)
    assert "--max-queue-wait-s" in str(admission_of(chosen).problem())


def admission_of(chosen: Settings) -> Admission:
    """One at which too many wait for the pace of one a second."""
    found = admission(100, chosen)
    ticked(found.pace, 20.0, 1.0)
    return found


def test_the_pace_follows_and_counts_only_while_requests_wait() -> None:
    pace = Pace()
    ticked(pace, 30.0, 10.0)
    assert pace.wait_s(50) == pytest.approx(5.0, rel=0.05)
    ticked(pace, 30.0, 1.0, waits=False, at_s=30.0)
    assert pace.wait_s(50) == pytest.approx(5.0, rel=0.05)
    ticked(pace, 40.0, 2.0, at_s=60.0)
    assert pace.wait_s(50) == pytest.approx(25.0, rel=0.15)
    stuck = Pace()
    ticked(stuck, 40.0, 0.0)
    assert stuck.wait_s(1) == math.inf


def busy(chosen: Settings, running: int) -> Admission:
    """With an empty pool, and so many requests in the only group."""
    loads = Loads()
    for number in range(running):
        loads.add(state(number), (0,), 15.0)
    return Admission(chosen, TaskPool(AGING_S), loads, lambda: [(0,)])


@pytest.mark.parametrize("running", [0, 1, LEAST])
def test_as_many_are_let_in_at_once_as_one_after_the_other(running: int) -> None:
    """Before any of them arrives: those that begin at once, and as many as may wait."""
    found = busy(settings(most_waiting=20), running)
    for number in range(LEAST - running + 20):
        found.reserve(CallSlots(f"c{number}", 10))
    with pytest.raises(PoolFull, match="20 requests wait already"):
        found.reserve(CallSlots("more", 10))
    assert found.refused == 1


def test_a_request_that_was_let_in_is_not_refused_when_it_arrives() -> None:
    """Though the queue is full by then; another one is."""
    found = admission(1, settings(most_waiting=2))
    found.reserve(CallSlots("c", 10))
    found._pool.add(state(7))
    found.enter(Origin("c"), urgent=False)
    for origin in (Origin("c"), Origin("other"), ALONE):
        with pytest.raises(PoolFull):
            found.enter(origin, urgent=False)


def test_slots_of_several_requests_are_reserved_for_each() -> None:
    found = admission(0, settings(most_waiting=3))
    found.reserve(CallSlots("c", 10, 3))
    assert found.problem() is not None
    for _ in range(3):
        found.enter(Origin("c"), urgent=False)
    assert found.problem() is None
    assert not found.slots


@pytest.mark.parametrize(("count", "fits"), [(LEAST + 3, True), (LEAST + 4, False)])
def test_a_call_is_let_in_with_all_its_requests_or_not_at_all(count: int, fits: bool) -> None:
    """Of one that is refused nothing is kept."""
    found = busy(settings(most_waiting=3), 0)
    if fits:
        found.reserve(CallSlots("c", 10, count))
        assert found.slots.requests[False] == count
    else:
        with pytest.raises(
            PoolFull,
            match=rf"^0 requests wait already, and n={count} adds {count} \(--max-waiting-",
        ):
            found.reserve(CallSlots("c", 10, count))
        assert not found.slots


@pytest.mark.parametrize(("count", "adds"), [(1, ""), (2, ", and n=2 adds 2")])
def test_refusal_counts_the_waiting_requests_without_its_own(count: int, adds: str) -> None:
    found = admission(5, settings(most_waiting=5))
    with pytest.raises(
        PoolFull, match=rf"^5 requests wait already{adds} \(--max-waiting-requests\)$"
    ):
        found.reserve(CallSlots("c", 10, count))


def test_refusal_counts_the_waiting_tokens_without_its_own() -> None:
    found = admission(2, replace(settings(), most_waiting_tokens=50))
    with pytest.raises(
        PoolFull, match=r"^20 prompt tokens wait already, and n=4 adds 40 \(--max-waiting-tokens\)$"
    ):
        found.reserve(CallSlots("c", 10, 4))


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize(
    ("bound", "bound_tokens"), [(3, 4_000_000), (1, 4_000_000), (100, 1), (100, 50), (100, 51)]
)
@pytest.mark.parametrize("prompt_tokens", [1, 10, 100])
def test_burst_lets_in_as_many_requests_as_an_idle_server(
    urgent: bool, bound: int, bound_tokens: int, prompt_tokens: int
) -> None:
    """With as many groups as engines: so much and no more."""
    chosen = replace(settings("manual", 4, most_waiting=bound), most_waiting_tokens=bound_tokens)
    groups = [(0,), (1,), (2,), (3,)]
    found = Admission(chosen, TaskPool(AGING_S), Loads(), lambda: groups)
    slots = CallSlots("c", prompt_tokens, urgent=urgent)
    most = found.most_at_once(slots)
    found.reserve(replace(slots, left=most))
    with pytest.raises(PoolFull):
        Admission(chosen, TaskPool(AGING_S), Loads(), lambda: groups).reserve(
            replace(slots, left=most + 1)
        )


def test_where_all_engines_stay_in_one_group_fewer_requests_run() -> None:
    chosen = settings("static-tp", 4, most_waiting=3)
    assert (
        Admission(chosen, TaskPool(AGING_S), Loads(), tuple).most_at_once(CallSlots("c", 10))
        == LEAST + 3
    )


def test_slots_that_are_released_count_no_more() -> None:
    """Nor does it when it is given back after its request has arrived."""
    chosen = replace(settings(most_waiting=1), most_waiting_tokens=500)
    found = admission(0, chosen)
    slots = CallSlots("c", 400)
    found.reserve(slots)
    assert "1 requests wait" in str(found.problem())
    found.slots.release(slots)
    assert found.problem() is None
    again = CallSlots("c", 400)
    found.reserve(again)
    found.enter(Origin("c"), urgent=False)
    found.slots.release(again)
    assert found.problem() is None


def test_prompt_tokens_of_reserved_slots_count_as_waiting() -> None:
    """But not those of requests that begin at once."""
    found = busy(replace(settings(), most_waiting_tokens=30), 0)
    for number in range(LEAST):
        found.reserve(CallSlots(f"c{number}", 30))
    found.reserve(CallSlots("waits", 30))
    with pytest.raises(PoolFull, match="30 prompt tokens wait already"):
        found.reserve(CallSlots("more", 30))


def test_urgent_slots_count_urgent_requests_only() -> None:
    found = admission(0, settings(most_waiting=1))
    found.reserve(CallSlots("c", 10, urgent=True))
    assert found.problem(urgent=True) is not None
    assert found.problem() is None
