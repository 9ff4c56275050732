"""Controller: requests that need a wider group than those that are there."""

from dataclasses import replace

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.predict.demand import Demand
from tests.unit.controller.examples import NARROW, OPEN_ENDED, SHORT, WIDE
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs


def test_a_long_request_gets_a_group_until_its_prompt_is_done() -> None:
    """The next one goes to a group that already is wide."""
    shell = ModelShell(settings("context", 4))
    shell.arrive("short", RequestSpec(5, 10, 5))
    shell.arrive("long", RequestSpec(221, 240, 19))
    assert shell.ordered is not None
    assert shell.ordered.decision is not None
    assert shell.ordered.decision.reason.startswith("context")
    shell.acknowledge()
    assert ("long", (0, 1, 2, 3)) in shell.dispatched
    shell.tick()
    shell.arrive("next", RequestSpec(101, 110, 9))
    shell.token("long")
    shell.tick()
    assert len(shell.switches) == 1
    assert shell.open["next"].group == shell.open["long"].group
    shell.token("next")
    shell.tick()
    assert shell.controller.state.layout == Layout.uniform(4, 1)
    assert sorted(shell.running()) == ["long", "next", "short"]


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_no_group_is_formed_for_a_long_request_before_its_turn(policy: str) -> None:
    """While earlier requests wait it could not begin there; later ones wait for it."""
    shell = ModelShell(settings(policy, 2, max_num_seqs=1), costs(fixed=2.0, rest=1.5))
    for name in "abcd":
        shell.arrive(name, SHORT)
    shell.arrive("long", RequestSpec(150, 180, 30))
    shell.arrive("e", SHORT)
    shell.tick()
    assert shell.waiting() == ["c", "d", "long", "e"]
    assert not shell.controller.changeover.is_under_way
    shell.finish("a", "b")
    assert shell.waiting() == ["long", "e"]
    shell.tick()
    assert shell.controller.changeover.is_under_way
    shell.finish("c", "d")
    shell.acknowledge()
    assert shell.dispatched[0] == ("long", (0, 1))
    shell.settle(5)


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_a_request_that_fills_its_engine_goes_on_in_a_group(policy: str) -> None:
    """With all of its tokens, and to its end there; what may not move ends where it is."""
    shell = ModelShell(settings(policy, 2), costs(fixed=2.0, rest=1.5))
    grows = RequestSpec(40, 41, 120, expected_tokens=20)
    shell.arrive("grows", grows)
    shell.arrive("fixed", replace(grows, can_migrate=False))
    shell.token("grows", 60)
    shell.token("fixed", 60)
    shell.acknowledge()
    assert shell.open["grows"].group == (0, 1)
    assert shell.open["grows"].tokens == 60
    assert "fixed" not in shell.open
    shell.settle(5)


def test_request_ends_at_its_limit_if_no_policy_forms_a_group() -> None:
    """Without a policy that forms one a request ends where its group is full, as in vLLM, unless
    there is a group.
    """
    for policy in ("manual", "load", "priority"):
        shell = ModelShell(settings(policy, 4), costs((1, 2, 4), fixed=2.0, rest=1.5))
        shell.arrive("grows", OPEN_ENDED)
        shell.token("grows", 60)
        assert "grows" not in shell.open
    shell = ModelShell(settings("manual", 4))
    shell.arrive("grows", OPEN_ENDED)
    shell.order(Layout(((0,), (1,), (2, 3))))
    shell.token("grows", 60)
    assert shell.open["grows"].group == (2, 3)


def test_an_urgent_request_gets_a_group_at_once() -> None:
    """Others keep running, engines are left for them, and new ones go there."""
    shell = ModelShell(settings("priority", 4), costs((1, 2, 4), fixed=0.9, rest=0.95))
    for number in range(4):
        shell.arrive(f"r{number}", SHORT)
    while shell.ordered is not None:
        shell.acknowledge()
        shell.tick()
    shell.arrive("urgent", RequestSpec(10, 30, 20, priority=-1))
    shell.arrive("other", SHORT)
    if shell.ordered is not None:
        shell.acknowledge()
    groups = shell.controller.state.layout.groups
    assert max(map(len, groups)) == 2
    assert len(groups) >= 2
    assert len(shell.running()) == 6
    shell.settle(12)


@pytest.mark.parametrize("long", [RequestSpec(10, 180, 170), RequestSpec(150, 180, 30)])
def test_a_long_request_is_not_starved_by_short_ones(long: RequestSpec) -> None:
    """However many come after it: they leave it the memory that it waits for, and its turn to be
    prefilled.
    """
    shell = ModelShell(settings("manual", 2, max_num_seqs=20, max_num_batched_tokens=32))
    shell.controller.state.demand.grew(0, 170)
    shell.controller.state.demand.finished(170)
    shell.order(WIDE)
    shell.acknowledge()
    for number in range(100):
        shell.now_s += 0.1
        for part in "abc":
            shell.arrive(f"{part}{number}", SHORT)
        if number == 4:
            shell.arrive("long", long)
        for name in shell.running()[: 2 if number > 2 else 0]:
            shell.finish(name, aborted=True)  # without tokens, so expected lengths stay
        if "long" in shell.running():
            return
    raise AssertionError("only short ones were served")


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_long_prompts_every_few_seconds_make_few_switches(policy: str) -> None:
    """Seven of them, among short requests for which groups are worse, so that each would make
    two.
    """
    shell = ModelShell(settings(policy, 2, max_num_seqs=16), costs(fixed=1.5, rest=1.3))
    long = RequestSpec(150, 160, 10)
    for step in range(200):
        shell.arrive(f"short{step}", RequestSpec(5, 8, 3))
        if step % 30 == 0:
            shell.arrive(f"long{step}", long)
        if shell.ordered is not None:
            shell.acknowledge()
        for name in shell.running():
            if name in shell.open and shell.open[name].group is not None:
                shell.token(name, 100)
        shell.tick()
    assert shell.open == {}
    assert len(shell.switches) <= 3


def test_a_long_prompt_is_not_paid_for_for_ever() -> None:
    """When no more come, the engines are apart again before the horizon (10 s) ends."""
    shell = ModelShell(settings("auto", 2, max_num_seqs=16), costs(fixed=1.5, rest=1.3))
    shell.arrive("long", RequestSpec(150, 160, 10))
    shell.acknowledge()
    shell.token("long", 100)
    for step in range(100):
        shell.arrive(f"short{step}", RequestSpec(5, 8, 3))
        if shell.ordered is not None:
            shell.acknowledge()
        for name in shell.running():
            shell.token(name, 100)
        shell.tick()
    assert shell.controller.state.layout == NARROW


@pytest.mark.parametrize("degree", [1, 4])
def test_a_degree_that_the_layout_lacks_is_not_starved(degree: int) -> None:
    """In pairs whose memory is always full of short requests; one that is wider has its turn ten
    times as soon.
    """
    shell = ModelShell(settings("manual", 4, max_num_seqs=64, capped=True))
    shell.controller.state.demand = shell.controller.state.lengths._demand = Demand((40.0, 20.0))
    shell.order(Layout.uniform(4, 2))
    shell.acknowledge()
    asks, count = RequestSpec(40, 60, 20), 0
    shell.arrive("first", replace(asks, degree=degree))
    shell.arrive("runs", replace(asks, degree=degree))

    def fill() -> None:
        nonlocal count
        while len(shell.waiting()) < 6:
            count += 1
            shell.arrive(f"r{count}", asks)

    fill()
    shell.arrive("waits", replace(asks, degree=degree))
    while shell.open["waits"].group is None:
        for name in [one for one in shell.running() if one.startswith("r") and one != "runs"][:1]:
            shell.token(name, 1000)
            fill()
        shell.tick(0.05)
        assert shell.now_s < (4.0 if degree == 4 else 33.0)
