"""TaskPool: the order of those that wait, and sums over them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flying_serving.controller.pool import SOONER, Kind, TaskPool
from flying_serving.controller.requests import RequestState
from flying_serving.controller.suspicion import Suspicion
from harness.examples import examples
from tests.unit.controller.queued import AGING_S, KINDS, state


def taken(pool: TaskPool, most: int = 1000, now_s: float = 0.0) -> list[str]:
    """Return the ids of up to so many requests in the order in which the pool gives them out."""
    ids: list[str] = []

    def dispatch(one: RequestState) -> bool:
        if len(ids) == most:
            return False
        ids.append(one.request_id)
        return True

    pool.hand_out(dispatch, now_s)
    return ids


def test_more_urgent_then_earlier_ones_come_first_across_kinds() -> None:
    pool = TaskPool(AGING_S)
    for number, priority in enumerate([0, 5, -1, 0, 5]):
        pool.add(state(number, priority=priority, kind=KINDS[number % 2]))
    assert taken(pool) == ["r2", "r0", "r3", "r1", "r4"]
    assert len(pool) == 0


def test_one_kind_that_finds_no_room_does_not_hold_back_others() -> None:
    """And nothing overtakes within its kind, even if it would fit."""
    pool = TaskPool(AGING_S)
    for number in range(6):
        pool.add(state(number, kind=KINDS[number % 2], prompt=50 if number == 2 else 10))
    tried: list[str] = []

    def dispatch(one: RequestState) -> bool:
        tried.append(one.request_id)
        return one.spec.prompt_tokens < 50

    pool.hand_out(dispatch, 0.0)
    assert tried == ["r0", "r1", "r2", "r3", "r5"]
    assert {one.request_id for one in pool} == {"r2", "r4"}


@pytest.mark.parametrize(
    "other", [Suspicion(1, 1, frozenset({0})), Suspicion(2, 2, frozenset()), Suspicion()]
)
def test_a_suspect_that_finds_no_group_holds_back_none_tried_otherwise(
    other: Suspicion,
) -> None:
    """Which groups it may have depends on its losses, its most suspects and the engines that it
    avoids.
    """
    pool, suspects = TaskPool(AGING_S), [state(0), state(1)]
    for one, suspicion in zip(suspects, (Suspicion(2, 1, frozenset({0})), other), strict=True):
        one.suspicion = suspicion
        pool.add(one)
    pool.hand_out(lambda one: one is not suspects[0], 0.0)
    assert [one.request_id for one in pool] == ["r0"]


def test_a_request_of_which_more_is_known_is_queued_anew_at_its_position() -> None:
    pool = TaskPool(AGING_S)
    for number in range(4):
        pool.add(state(number, kind=KINDS[number % 2]))
    pool.revise(lambda one: setattr(one, "sizes", KINDS[1][1]))
    assert pool.oldest_s == 0.0
    assert taken(pool, 1) == ["r0"]
    pool.revise(lambda one: setattr(one, "sizes", KINDS[0][1]))
    assert taken(pool) == ["r1", "r2", "r3"]
    assert not pool._queues and not pool._ages


def test_a_request_that_comes_back_has_its_old_position() -> None:
    """It was taken, and is ahead of all that arrived after it."""
    pool = TaskPool(AGING_S)
    first = state(0)
    for one in (first, state(1), state(2)):
        pool.add(one)
    assert taken(pool, 2) == ["r0", "r1"]
    pool.add(first)
    assert taken(pool) == ["r0", "r2"]


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_ended_requests_leave_no_entries(how: str) -> None:
    """Though none of them was ever the first."""
    pool = TaskPool(AGING_S)
    remaining = [state(number, priority=-1, kind=KINDS[number]) for number in range(3)]
    for one in remaining:
        pool.add(one)
    for number in range(10, 5000):
        pool.add(state(number, kind=KINDS[3 if how == "taken" else number % 4]))
        if how == "taken":
            pool.hand_out(lambda one: one not in remaining, 0.0)
        else:
            pool.remove(f"r{number}")
        queues = [*pool._queues.values(), *pool._ages.values()]
        assert sum(map(len, queues)) <= 8 * len(remaining)
    assert sorted(taken(pool)) == ["r0", "r1", "r2"]


@pytest.mark.parametrize(("now_s", "after_s"), [(50.0, 10), (30.5, 1), (30.0, 1)])
def test_a_request_is_to_come_back_after_half_of_the_longest_wait(
    now_s: float, after_s: int
) -> None:
    """But not within the same second. About half of those that wait are dispatched by then."""
    pool = TaskPool(AGING_S)
    assert pool.retry_after_s(now_s) == 1
    for number, at_s in enumerate([30.0, 45.0]):
        pool.add(state(number, at_s=at_s))
    assert pool.retry_after_s(now_s) == after_s


def test_an_overdue_request_is_offered_every_second_dispatch() -> None:
    """Beside a stream of urgent ones; the oldest first, of whatever kind."""
    pool = TaskPool(AGING_S)
    for number in range(4):
        pool.add(state(number, priority=10 - number, kind=KINDS[number % 2]))
    for number in range(4, 14):
        pool.add(state(number, priority=-1, at_s=20.0))
    assert taken(pool, 2, AGING_S - 0.1) == ["r4", "r5"]
    assert taken(pool, 7, AGING_S) == ["r0", "r6", "r1", "r7", "r2", "r8", "r3"]


def test_one_overdue_that_finds_no_room_does_not_hold_back_another_kind() -> None:
    """It remaining the next one to be offered a group."""
    pool = TaskPool(AGING_S)
    pool.add(state(0, kind=KINDS[1]))
    pool.add(state(1, priority=5))
    for number in range(2, 5):
        pool.add(state(number, priority=-1))
    tried: list[str] = []

    def dispatch(one: RequestState) -> bool:
        tried.append(one.request_id)
        return one.sizes != KINDS[1][1]

    pool.hand_out(dispatch, AGING_S)
    assert tried == ["r2", "r0", "r1", "r3", "r4"]
    assert pool.first(AGING_S).request_id == "r0"  # type: ignore[union-attr]


@given(st.data())
def test_request_waits_for_at_most_twice_the_requests_ahead_of_it(data: st.DataObject) -> None:
    """Whatever comes after a request is overdue, and however urgent it is."""
    pool = TaskPool(AGING_S)
    priorities = st.integers(-(2**40), 2**40)
    early = data.draw(
        st.lists(st.tuples(priorities, st.sampled_from(KINDS)), min_size=1, max_size=8)
    )
    for number, (priority, kind) in enumerate(early):
        pool.add(state(number, priority=priority, kind=kind))
    dispatched = 0
    left = {f"r{number}" for number in range(len(early))}
    number = len(early)
    while left:
        for priority in data.draw(st.lists(priorities, max_size=3)):
            pool.add(state(number, priority=priority, at_s=AGING_S))
            number += 1
        for request_id in taken(pool, 1, AGING_S):
            dispatched += 1
            left.discard(request_id)
            if request_id in {f"r{n}" for n in range(len(early))}:
                assert dispatched <= 2 * (int(request_id[1:]) + 1)


class Waiting(RuleBasedStateMachine):
    """Requests that come, leave, are taken and come back, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TaskPool(2.0)
        self.oldest_next = False
        self.model: dict[str, RequestState] = {}
        self.away: list[RequestState] = []
        self.count = 0
        self.now_s = 0.0

    def kind(self, one: RequestState) -> Kind:
        return (one.spec.degree, one.sizes)

    def next_of(self, waiting: list[RequestState]) -> RequestState | None:
        by_age = self.oldest_next and any(self.overdue(one) for one in waiting)
        return min(
            waiting, key=lambda one: (0 if by_age else one.spec.priority, one.order), default=None
        )

    def overdue(self, one: RequestState) -> bool:
        return self.now_s - one.arrived_s >= 2.0

    def by_age(self, one: RequestState) -> bool:
        return self.oldest_next and self.overdue(one)

    @precondition(lambda self: len(self.model) < 8)
    @rule(kind=st.sampled_from(KINDS), priority=st.integers(-2, 2), prompt=st.integers(1, 100))
    def arrive(self, kind: Kind, priority: int, prompt: int) -> None:
        self.count += 1
        one = state(self.count, kind=kind, priority=priority, prompt=prompt, at_s=self.now_s)
        self.pool.add(one)
        self.model[one.request_id] = one

    @precondition(lambda self: self.away and len(self.model) < 8)
    @rule(data=st.data())
    def wait_again(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.away))
        self.away.remove(one)
        self.pool.add(one)
        self.model[one.request_id] = one

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(1, self.count))}"
        assert self.pool.remove(request_id) is self.model.pop(request_id, None)

    @rule(room=st.fixed_dictionaries({kind: st.integers(0, 3) for kind in KINDS}))
    def take(self, room: dict[Kind, int]) -> None:
        """Each kind is offered in order until its room is used up; the best of all kinds is always
        next.
        """
        expected: list[RequestState] = []
        left = dict(room)
        while one := self.next_of(
            [one for one in self.model.values() if one not in expected and left[self.kind(one)]]
        ):
            left[self.kind(one)] -= 1
            self.oldest_next = not self.by_age(one)
            expected.append(one)
        given = []

        def dispatch(one: RequestState) -> bool:
            if not room[self.kind(one)]:
                return False
            room[self.kind(one)] -= 1
            given.append(one)
            return True

        self.pool.hand_out(dispatch, self.now_s)
        assert given == expected
        for one in given:
            del self.model[one.request_id]
            one.admitted = True
            self.away.append(one)

    @rule(passed_s=st.floats(0.0, 3.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @invariant()
    def adds_up(self) -> None:
        pool, model = self.pool, self.model
        assert len(pool) == len(model)
        assert {one.request_id for one in pool} == set(model)
        assert all(request_id in pool for request_id in model)
        assert pool.prompt_tokens == sum(one.spec.prompt_tokens for one in model.values())
        assert pool.urgent == sum(one.spec.urgent for one in model.values())
        assert pool.first(self.now_s) is self.next_of(list(model.values()))
        assert (pool.oldest_s is None) == (not model)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=examples(60), stateful_step_count=30)


@pytest.mark.parametrize(("wide", "after_s"), [(True, AGING_S / SOONER), (False, AGING_S)])
def test_one_wider_than_all_groups_is_overdue_sooner(wide: bool, after_s: float) -> None:
    """It goes before a more urgent one then, at every second dispatch."""
    pool = TaskPool(AGING_S, is_wider=lambda one: wide and one.spec.degree == 2)
    pool.add(state(0, kind=KINDS[3]))
    before, after = after_s - 0.01, after_s + 0.01
    for number in range(1, 5):
        pool.add(state(number, priority=-1, at_s=before))
    assert taken(pool, 2, before) == ["r1", "r2"]
    assert taken(pool, 1, after) == ["r0"]
