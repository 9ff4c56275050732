"""Routers of baselines: they count requests, and know nothing that stock vLLM's does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.routers import FewestInFlight
from flying_lab.sim.catalog import build, names
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective

APART = Layout.uniform(4, 1)
MACHINE = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x4"))


@pytest.mark.parametrize(
    "name",
    [name for name in names(MACHINE) if name.startswith(("stock-", "shift-"))],
)
def test_stock_has_the_rule_of_its_own_router(name: str) -> None:
    assert build(name, MACHINE, 1, Options()).placing is FewestInFlight


def routed(requests: list[tuple[int, int, int]], priorities: list[int]) -> list[Group]:
    """Return the groups of requests, each with its prompt's tokens and the place in the list of the
    request that ends before it comes.
    """
    limits = Limits(4, 64, capped=False)
    settings = Settings(
        4,
        Capacity(dict.fromkeys((1, 2, 4), 10**6), 1),
        POLICIES["static-dp"],
        limits,
        Objective(10.0),
    )
    state = ClusterState(settings)
    router, groups, running = FewestInFlight(state), [], []
    for number, ((prompt, output, ends), priority) in enumerate(
        zip(requests, priorities, strict=False)
    ):
        if running and ends < len(running):
            state.loads.remove(running.pop(ends))
        spec = RequestSpec(prompt, prompt, output, priority=priority)
        request = RequestState(str(number), spec, (1,), number, 0.0)
        group = router.choose(request, APART)
        state.loads.add(request, group, prompt + output)
        running.append(request)
        groups.append(group)
    return groups


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 100), st.integers(0, 9)), max_size=30
    ),
    priorities=st.lists(st.integers(-2, 2), min_size=30, max_size=30),
)
def test_urgency_and_length_change_nothing(
    requests: list[tuple[int, int, int]], priorities: list[int]
) -> None:
    """The groups are those of requests that are all alike."""
    alike = [(1, 1, ends) for _, _, ends in requests]
    assert routed(requests, priorities) == routed(alike, [0] * 30)


def test_the_engine_with_the_fewest_requests_comes_next() -> None:
    none_ends = 9
    first = [group for (group,) in routed([(1, 1, none_ends)] * 9, [0] * 9)]
    assert first == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    # the request on engine 1 ends before the fifth comes
    assert routed([(1, 1, none_ends)] * 4 + [(1, 1, 1)], [0] * 5)[-1] == (1,)
