"""What a request needs: its prompt and what is expected of it, not all that it may take."""

from dataclasses import replace

import pytest

from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.errors import RequestError
from flying_serving.layout.groups import Layout
from flying_serving.predict.demand import MARGIN_TOKENS
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs

AGENT = RequestSpec(40, 41, 120, expected_tokens=20, most_tokens=160)
"""It may take more than an engine holds, which is 100 tokens."""
WIDE_IS_WORSE = costs((1, 2, 4), fixed=2.0, rest=1.5)
PAIR_AND_TWO = Layout(((0,), (1,), (2, 3)))


def sizes(policy: str, spec: RequestSpec, usual_output: int = 20) -> tuple[int, ...]:
    """Return the group sizes of a request that arrives where outputs are usually so long."""
    shell = ModelShell(settings(policy), WIDE_IS_WORSE)
    for _ in range(50):
        shell.controller.state.demand.grew(0, usual_output)
        shell.controller.state.demand.finished(usual_output)
        shell.controller.state.demand.arrived(10, 400, 0.0)
    shell.arrive("r", spec)
    (state,) = (*shell.controller.state.pool, *shell.controller.state.started.values())
    return state.sizes


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_no_group_is_formed_for_the_limit_of_a_request(policy: str) -> None:
    shell = ModelShell(settings(policy), WIDE_IS_WORSE)
    shell.arrive("agent", AGENT)
    assert shell.open["agent"].group in Layout.uniform(4, 1).groups
    assert not shell.controller.changeover.is_under_way


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_a_request_that_is_longer_than_expected_goes_on_in_a_group(policy: str) -> None:
    """With the tokens that it has."""
    shell = ModelShell(settings(policy), WIDE_IS_WORSE)
    shell.arrive("agent", AGENT)
    shell.token("agent", 60)
    shell.acknowledge()
    assert len(shell.open["agent"].group or ()) == 2
    assert shell.open["agent"].tokens == 60
    shell.settle(5)


@pytest.mark.parametrize("policy", ["manual", "load", "priority"])
def test_request_ends_where_its_group_is_full_if_no_group_is_formed(policy: str) -> None:
    """It waits for none either, although it could be longer."""
    shell = ModelShell(settings(policy), WIDE_IS_WORSE)
    shell.arrive("agent", AGENT)
    assert len(shell.open["agent"].group or ()) == 1
    shell.token("agent", 60)
    assert "agent" not in shell.open


@pytest.mark.parametrize(
    ("spec", "usual_output", "expected"),
    [
        (AGENT, 20, (1, 2, 4)),
        (replace(AGENT, expected_tokens=None), 20, (1, 2, 4)),
        (replace(AGENT, expected_tokens=None), 90, (2, 4)),
        (replace(AGENT, expected_tokens=90), 20, (2, 4)),
        (replace(AGENT, max_output_tokens=30, most_tokens=70), 90, (1, 2, 4)),
        (replace(AGENT, max_output_tokens=2000, most_tokens=None, expected_tokens=1900), 20, (4,)),
        (replace(AGENT, least_tokens=160), 20, (2, 4)),
        (replace(AGENT, degree=1, expected_tokens=55), 20, (1,)),
    ],
)
def test_groups_are_formed_for_the_expected_length(
    spec: RequestSpec, usual_output: int, expected: tuple[int, ...]
) -> None:
    """By the client, or as others were; never more than it may take, nor than the widest group
    holds.
    """
    if spec.degree is not None:
        spec = replace(spec, most_tokens=100)
    assert sizes("auto", spec, usual_output) == expected


def test_expected_length_is_no_need_if_no_group_is_formed() -> None:
    """A request would wait for what may never come."""
    assert sizes("manual", replace(AGENT, expected_tokens=90)) == (1, 2, 4)


@pytest.mark.parametrize(("expected_tokens", "size"), [(20, 1), (90, 2)])
def test_group_that_holds_the_expected_length_comes_first(expected_tokens: int, size: int) -> None:
    shell = ModelShell(settings("manual", capped=False), WIDE_IS_WORSE)
    shell.order(PAIR_AND_TWO)
    shell.acknowledge()
    shell.arrive("agent", replace(AGENT, expected_tokens=expected_tokens))
    assert len(shell.open["agent"].group or ()) == size


def test_where_groups_may_go_away_one_that_holds_all_comes_first() -> None:
    """It could not go on in another group: it would end."""
    shell = ModelShell(settings("load"), WIDE_IS_WORSE)
    state = RequestState("agent", AGENT, (1, 2, 4), 1, 0.0)
    assert shell.controller.state.lengths.set_sizes_of_new(state, [1, 2, 4]).likely_tokens == 160


@pytest.mark.parametrize(("most_tokens", "degree"), [(401, None), (101, 1)])
def test_request_longer_than_every_group_is_refused(most_tokens: int, degree: int | None) -> None:
    with pytest.raises(RequestError, match=f"prompt plus max_tokens are {most_tokens}"):
        ModelShell(settings("auto")).arrive(
            "r", replace(AGENT, most_tokens=most_tokens, degree=degree)
        )


def test_request_that_cannot_migrate_needs_room_for_its_limit() -> None:
    """It would be cut short where it fills its group."""
    one = replace(AGENT, can_migrate=False)
    assert one.needed_tokens == 160
    assert sizes("auto", one) == (2, 4)


def test_group_of_a_lost_engine_is_not_expected() -> None:
    """A pair would be needed, and none can be formed: it begins where it can."""
    shell = ModelShell(settings("auto"), WIDE_IS_WORSE)
    state = RequestState("r", replace(AGENT, expected_tokens=90), (1, 2, 4), 1, 0.0)
    assert shell.controller.state.lengths.set_sizes_of_new(state, [1]).sizes == (1, 2, 4)


def test_certain_tokens_of_a_request_are_booked() -> None:
    """Where others have had less: two would preempt each other on an engine of 100 tokens."""
    shell = ModelShell(settings("manual", 2), WIDE_IS_WORSE)
    for _ in range(50):
        shell.controller.state.demand.grew(0, 5)
        shell.controller.state.demand.finished(5)
    for number in range(3):
        shell.arrive(f"r{number}", RequestSpec(10, 90, 80, most_tokens=90))
    assert shell.waiting() == ["r2"]


@pytest.mark.parametrize(
    ("spec", "planned"),
    [
        (AGENT, 20 + MARGIN_TOKENS),
        (replace(AGENT, expected_tokens=None), 50 + MARGIN_TOKENS),
        (replace(AGENT, expected_tokens=None, max_output_tokens=60), 60),
        (replace(AGENT, least_tokens=140), 100),
    ],
    ids=["the client says", "as others were", "no more than it may have", "it is sure to have"],
)
def test_a_split_is_planned_for_the_expected_output_and_a_margin(
    spec: RequestSpec, planned: int
) -> None:
    shell = ModelShell(settings("manual", 2), WIDE_IS_WORSE)
    demand = shell.controller.state.demand
    for _ in range(500):
        demand.arrived(10, 400, 0.0)
        demand.grew(0, 50)
        demand.finished(50)
    state = RequestState("r", spec, (1, 2), 1, 0.0)
    assert shell.controller.state.lengths.planned_outputs(state) == planned
