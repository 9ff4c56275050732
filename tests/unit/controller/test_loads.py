"""Loads: whatever comes, gets tokens and goes, the sums are those of the requests that are
there.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import GroupLoad
from flying_serving.predict.demand import Outputs
from harness.examples import examples

GROUPS = [group for size in (1, 2, 4) for group in Layout.uniform(4, size).groups]
EVEN = Outputs(20.0, 4 / 3 * 20.0**2)


def state(
    number: int, prompt: int = 10, priority: int = 0, variant: int | None = None
) -> RequestState:
    """Return a request that fits anywhere."""
    return RequestState(
        f"r{number}",
        RequestSpec(prompt, prompt + 50, 50, priority=priority, variant=variant),
        (1, 2, 4),
        number,
        0.0,
    )


def test_policy_sees_means_over_the_requests_of_a_group() -> None:
    """Means over the requests of a group."""
    loads = Loads()
    first, second = state(1, prompt=100), state(2, prompt=300)
    loads.add(first, (0, 1), 120.0)
    loads.add(second, (0, 1), 320.0)
    loads.add_tokens(first, 4)
    assert loads.as_seen(EVEN) == {
        (0, 1): GroupLoad(
            2, EVEN.left(2.0), EVEN.longest(2.0, 2), 202.0, 300, 1, booked_tokens=440.0
        )
    }
    loads.add_tokens(second, 60)
    assert loads.as_seen(EVEN) == {
        (0, 1): GroupLoad(2, EVEN.left(32.0), EVEN.longest(32.0, 2), 232.0, 0, booked_tokens=440.0)
    }


def test_long_requests_are_counted_by_the_engines_that_they_need() -> None:
    """By how many engines they need at least; at most what they asked for is left of them."""
    loads = Loads()
    loads.add(state(1, prompt=100), (0, 1, 2, 3), 120.0)
    assert loads.as_seen(EVEN)[(0, 1, 2, 3)].by_least_size == {}
    two = RequestState("two", RequestSpec(300, 350, 50), (2, 4), 2, 0.0)
    four = RequestState("four", RequestSpec(600, 612, 12), (4,), 3, 0.0)
    loads.add(two, (0, 1, 2, 3), 320.0)
    loads.add(four, (0, 1, 2, 3), 612.0)
    loads.add_tokens(four, 7)
    left = EVEN.left(0.0)
    assert loads.as_seen(EVEN)[(0, 1, 2, 3)].by_least_size == {
        2: GroupLoad(2, (left + 5.0) / 2, left, (300 + 607) / 2, 300, 1),
        4: GroupLoad(1, 5.0, 5.0, 607.0, 0, 0),
    }
    assert loads[(0, 1, 2, 3)].wide
    assert not loads[(0,)].wide and not loads[(1,)].wide
    loads.remove(four)
    assert set(loads.as_seen(EVEN)[(0, 1, 2, 3)].by_least_size) == {2}
    loads.remove(two)
    assert loads.as_seen(EVEN)[(0, 1, 2, 3)].by_least_size == {}
    assert not loads[(0, 1, 2, 3)].wide


def test_a_request_that_migrates_is_prefilled_again() -> None:
    """Its tokens count as its prompt in the new group."""
    loads = Loads()
    one = state(1, prompt=100)
    loads.add(one, (0,), 150.0)
    loads.add_tokens(one, 7)
    assert loads.unfinished == {}
    loads.remove(one)
    loads.remove(one)
    assert loads.groups == []
    assert one.group is None
    loads.add(one, (0, 1), 150.0)
    assert one.prefill_tokens == loads[(0, 1)].prefill_tokens == 107
    assert loads[(0,)].requests == {}
    assert list(loads.unfinished.values()) == [one]


def test_a_group_knows_the_variants_of_its_requests() -> None:
    """Until the last request of each has left."""
    loads = Loads()
    made = [state(number, variant=variant) for number, variant in enumerate((7, 7, 8, None))]
    for one in made:
        loads.add(one, (0, 1), 60.0)
    assert loads[(0, 1)].variants == {7: 2, 8: 1, None: 1}
    assert loads[(2,)].variants == {}
    loads.remove(made[2])
    loads.add_tokens(made[0], 1)
    assert set(loads[(0, 1)].variants) == {7, None}
    loads.check_integrity()
    loads.remove(made[0])
    loads.add(made[0], (2,), 60.0)
    assert loads[(0, 1)].variants == {7: 1, None: 1}
    assert loads[(2,)].variants == {7: 1}


@pytest.mark.parametrize(("tokens", "ahead"), [(7, 1), (0, 100)])
def test_request_with_kv_prefills_only_its_remaining_tokens(tokens: int, ahead: int) -> None:
    """One token of a request that streamed; of a prompt that was not done nobody knows how much
    was.
    """
    loads = Loads()
    one = state(1, prompt=100)
    loads.add(one, (0,), 150.0)
    if tokens:
        loads.add_tokens(one, tokens)
    loads.remove(one)
    loads.add(one, (0, 1), 150.0, with_kv=True)
    assert one.prefill_tokens == loads[(0, 1)].prefill_tokens == ahead
    loads.remove(one)
    loads.add(one, (0,), 150.0)
    assert one.prefill_tokens == 100 + tokens


class Books(RuleBasedStateMachine):
    """Requests on the move, against sums made afresh."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = Loads()
        self.inside: list[RequestState] = []
        self.outside: list[RequestState] = []
        self.fresh: list[str] = []
        self.expected: dict[str, float] = {}
        self.count = 0

    def pick(self, data: st.DataObject, requests: list[RequestState]) -> RequestState:
        return data.draw(st.sampled_from(requests))

    def enter(self, one: RequestState, group: Group, extra: float) -> None:
        self.expected[one.request_id] = one.context_tokens + extra
        self.loads.add(one, group, one.context_tokens + extra)
        self.inside.append(one)
        self.fresh.append(one.request_id)

    @rule(
        group=st.sampled_from(GROUPS),
        prompt=st.integers(1, 500),
        priority=st.integers(-1, 1),
        variant=st.sampled_from([None, 1, 2]),
        extra=st.floats(1, 99),
    )
    def enter_new(
        self, group: Group, prompt: int, priority: int, variant: int | None, extra: float
    ) -> None:
        self.count += 1
        self.enter(state(self.count, prompt, priority, variant), group, extra)

    @precondition(lambda self: self.outside)
    @rule(data=st.data(), group=st.sampled_from(GROUPS), extra=st.floats(1, 99))
    def enter_again(self, data: st.DataObject, group: Group, extra: float) -> None:
        one = self.pick(data, self.outside)
        self.outside.remove(one)
        self.enter(one, group, extra)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), count=st.integers(1, 5))
    def get_tokens(self, data: st.DataObject, count: int) -> None:
        one = self.pick(data, self.inside)
        before = one.output_tokens
        self.loads.add_tokens(one, count)
        assert one.output_tokens == before + count
        if one.request_id in self.fresh:
            self.fresh.remove(one.request_id)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), extra=st.floats(1, 99))
    def rebook(self, data: st.DataObject, extra: float) -> None:
        one = self.pick(data, self.inside)
        self.expected[one.request_id] = one.context_tokens + extra
        self.loads.rebook(one, one.context_tokens + extra)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        one = self.pick(data, self.inside)
        self.loads.remove(one)
        self.inside.remove(one)
        self.outside.append(one)
        if one.request_id in self.fresh:
            self.fresh.remove(one.request_id)

    @invariant()
    def sums_are_those_of_the_requests(self) -> None:
        loads = self.loads
        assert sorted(loads.groups) == sorted({one.group for one in self.inside if one.group})
        for group in GROUPS:
            mine = [one for one in self.inside if one.group == group]
            work = loads[group]
            assert sorted(work.requests) == sorted(one.request_id for one in mine)
            assert work.prompt_tokens == sum(one.spec.prompt_tokens for one in mine)
            assert work.output_tokens == sum(one.output_tokens for one in mine)
            assert work.prefill_tokens == sum(
                one.context_tokens for one in mine if one.request_id in self.fresh
            )
            assert work.committed_tokens == pytest.approx(
                sum(self.expected[one.request_id] for one in mine)
            )
            assert work.urgent == sum(one.spec.urgent for one in mine)
        loads.check_integrity()
        for engine in range(4):
            assert set(loads.of_engine(engine)) == {g for g in loads.groups if engine in g}
        assert sum(load.requests for load in loads.as_seen(EVEN).values()) == len(self.inside)

    @invariant()
    def unfinished_requests_are_in_the_order_of_their_start(self) -> None:
        assert list(self.loads.unfinished) == self.fresh


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(40), stateful_step_count=30)
