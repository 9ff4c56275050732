"""Controller: arrivals and decisions. Under any sequence of events: test_controller_machine.py."""

from dataclasses import replace

import pytest

from flying_serving.controller.commands import RevokeOffer
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.switches import SETTLE_S
from flying_serving.errors import PoolFull
from flying_serving.layout.groups import Layout
from flying_serving.predict.steps import Step
from tests.unit.controller.examples import NARROW, OPEN_ENDED, SHORT, WIDE
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs, measured


@pytest.mark.deep
def test_an_urgent_request_goes_ahead_of_a_flood() -> None:
    """Of as many as may wait."""
    shell = ModelShell(settings("load", 2, max_num_seqs=1, most_waiting=5000))
    names = (f"r{number}" for number in range(6000))
    while len(shell.controller.state.pool) < 5000:
        shell.arrive(next(names), SHORT)
    with pytest.raises(PoolFull):
        shell.arrive(next(names), SHORT)
    running = shell.running()
    shell.arrive("urgent", replace(SHORT, priority=-1))
    shell.finish(running[0])
    assert "urgent" in shell.running()


def test_too_many_requests_are_told_when_to_come_again() -> None:
    """A whole number of seconds, at least one, more if those in front wait long."""
    shell = ModelShell(settings("load", 2, max_num_seqs=1, most_waiting=2))
    names = (f"r{number}" for number in range(8))
    while len(shell.controller.state.pool) < 2:
        assert shell.controller.state.pool.retry_after_s(shell.now_s) == 1
        shell.arrive(next(names), SHORT)
    with pytest.raises(PoolFull, match="2 requests wait already"):
        shell.arrive(next(names), SHORT)
    assert (
        shell.controller.state.pool.retry_after_s(shell.now_s + 9.0)
        > shell.controller.state.pool.retry_after_s(shell.now_s + 3.0)
        > 1
    )
    shell.check()


def test_dry_run_logs_its_decision_and_keeps_the_layout() -> None:
    """Once, until it is something else."""
    shell = ModelShell(settings("context", 2, dry_run=True))
    shell.arrive("long", RequestSpec(140, 150, 10))
    for _ in range(3):
        shell.tick()
    assert [decision.layout for decision in shell.controller.decider.dry_run] == [WIDE]
    assert shell.controller.state.layout == NARROW
    assert shell.switches == []


def test_the_last_decision_is_known_if_the_layout_stays() -> None:
    """An idle server goes together, and compares layouts again; one with a fixed layout never
    does.
    """
    idle, fixed = ModelShell(settings("auto", 2)), ModelShell(settings("static-dp", 2))
    idle.tick()
    idle.acknowledge()
    for shell in (idle, fixed):
        shell.tick()
    last = idle.controller.decider.last
    assert last is not None and not last.is_made
    assert idle.controller.state.layout in last.predicted
    assert fixed.controller.decider.last is None


def test_fixed_policies_are_in_their_layout_from_the_start() -> None:
    """Whatever comes."""
    for policy, layout in (
        ("static-dp", Layout.uniform(4, 1)),
        ("static-tp", Layout.uniform(4, 4)),
    ):
        shell = ModelShell(settings(policy))
        for number in range(50):
            shell.arrive(f"r{number}", RequestSpec(40, 60, 20, priority=-number))
            shell.tick()
        assert shell.controller.state.layout == layout
        assert shell.waiting() == []
        assert shell.switches == []


def test_measured_steps_decide() -> None:
    """Nothing is decided before every lane was measured; what traffic shows counts more than the
    start.
    """
    shell = ModelShell(settings("load", 2))
    assert shell.controller.state.layout == NARROW
    unmeasured = ModelShell(settings("load", 2), {1: costs()[1]})
    unmeasured.tick()
    assert unmeasured.switches == []
    shell.tick()
    assert shell.controller.state.layout == WIDE
    shell.acknowledge()
    slow = measured({2: costs(fixed=3.0, rest=3.0)[2]})
    shell.controller.stepped([step for _ in range(100) for step in slow])
    shell.controller.stepped([Step(1, 0.03, 0, 1, 16)])
    shell.tick()
    assert shell.controller.state.layout == WIDE  # the switch before has not settled
    shell.now_s += SETTLE_S
    shell.tick()
    assert shell.controller.state.layout == NARROW
    decision = shell.switches[-1].decision
    assert decision is not None
    assert decision.gain > decision.cost == decision.considered[decision.mode]


@pytest.mark.parametrize(("waiting", "at_arrival"), [(1, True), (2, False)])
def test_where_many_wait_one_more_is_not_reason_enough_to_decide(
    waiting: int, at_arrival: bool
) -> None:
    """The next tick does."""
    shell = ModelShell(settings("load", 2, max_num_seqs=2), {1: costs()[1]})
    for number in range(4 + waiting):
        shell.arrive(f"r{number}", SHORT)
    assert len(shell.waiting()) == waiting
    shell.controller.state.steps.calibrate(measured({2: costs(fixed=0.1, rest=0.1)[2]}))
    shell.arrive("another", SHORT)
    assert shell.controller.changeover.is_under_way == at_arrival
    shell.tick()
    assert shell.controller.changeover.is_under_way


def test_request_that_is_aborted_with_tokens_counts_among_the_lengths() -> None:
    """A stop string ends a request as an abort does."""
    shell = ModelShell(settings("load", 2))
    for number in range(60):
        shell.arrive(f"r{number}", OPEN_ENDED)
        shell.token(f"r{number}", 40)
        shell.finish(f"r{number}", aborted=True)
    assert shell.controller.state.demand.output_tokens == pytest.approx(40.0, rel=0.1)


def test_a_request_that_ends_at_a_full_group_revokes_its_offer() -> None:
    """No group will pull it. Without an offer there is nothing to revoke."""
    shell = ModelShell(settings("manual", 2))
    shell.arrive("a", SHORT)
    assert shell.controller.ends_at_full_group("a") == []
    request = shell.controller.state.started["a"]
    request.offer = 1
    assert request.group is not None
    assert shell.controller.ends_at_full_group("a") == [RevokeOffer("a", request.group)]
