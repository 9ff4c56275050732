"""Controller: when a switch is ordered, and when requests move to its layout."""

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from tests.unit.controller.examples import NARROW, SHORT, WIDE, manual
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell


def test_a_sequential_switch_holds_new_requests_until_old_ones_ended() -> None:
    """Then engines are told, and only then the requests go, to the new group; the answers may come
    later.
    """
    shell = manual()
    for name in "ab":
        shell.arrive(name, SHORT)
    assert {shell.open[name].group for name in "ab"} == {(0,), (1,)}
    shell.order(WIDE, "sequential")
    shell.arrive("c", SHORT)
    shell.now_s += 2.0
    shell.finish("a")
    assert shell.waiting() == ["c"]
    assert shell.ordered is None
    shell.finish("b")
    assert shell.ordered is not None
    assert shell.dispatched == [("c", (0, 1))]
    assert shell.ordered.waited_for_idle_ms == pytest.approx(2000.0)


@pytest.mark.parametrize("mode", ["sequential", "soft"])
def test_a_switch_that_waits_can_be_dropped(mode: str) -> None:
    """Requests that it held back begin in the present layout, at once; another switch may follow,
    and moves none.
    """
    shell = manual()
    shell.arrive("a", SHORT)
    shell.order(WIDE, mode)
    shell.arrive("b", SHORT)
    shell.arrive("c", SHORT)
    switch = shell.controller.changeover.untold_switch
    assert switch is not None
    shell.drop()
    assert shell.waiting() == []
    assert shell.open["b"].group in NARROW.groups
    assert switch.problem == "cancelled"
    assert switch.cutover_ms is None
    assert not switch.open
    shell.order(WIDE, "weave")
    assert shell.controller.changeover.untold_switch is None
    shell.acknowledge()
    assert shell.dispatched == []
    shell.settle(3)


@pytest.mark.parametrize("mode", ["sequential", "soft"])
def test_a_switch_that_waits_longer_than_predicted_is_made_at_once(mode: str) -> None:
    """In a way for which nobody waits: one long output does not keep the others waiting for its
    end.
    """
    shell = manual()
    shell.arrive("long", SHORT)
    decision = Decision(WIDE, mode, "load: 1.00 requests/s", 5.0, 1.0, drain_s=0.4)
    shell.carry_out(shell.controller.begin_switch(WIDE, mode, None, shell.now_s, decision)[1])
    shell.arrive("c", SHORT)
    shell.tick(0.5)
    assert shell.ordered is None
    shell.tick(0.5)
    assert shell.ordered is not None
    assert shell.ordered.mode == "migrate"
    shell.acknowledge()
    assert shell.waiting() == []
    assert shell.open["c"].group == (0, 1)
    shell.settle(3)


def test_requests_begun_by_idle_engines_in_a_soft_switch_migrate() -> None:
    """With the tokens that it has by then. What may not move, or asked for a degree, stays."""
    shell = manual()
    shell.arrive("old", SHORT)
    shell.order(WIDE, "soft")
    wishes = {
        "migrates": SHORT,
        "fixed": RequestSpec(10, 30, 20, can_migrate=False),
        "degree": RequestSpec(10, 30, 20, degree=1),
    }
    for name, spec in wishes.items():
        shell.arrive(name, spec)
        shell.token(name, 5)
    assert shell.waiting() == []
    assert shell.ordered is None
    shell.finish("old")
    assert shell.ordered is not None
    assert shell.dispatched == []
    shell.acknowledge()
    assert shell.dispatched == [("migrates", (0, 1))]
    assert shell.open["migrates"].tokens == 5
    shell.settle(3)


def test_requests_migrate_as_soon_as_their_engines_have_answered() -> None:
    """Whoever stays in its group may be in a long step; the next switch waits for its answer,
    nothing else does.
    """
    shell = ModelShell(settings("manual", 4))
    for name in "abcd":
        shell.arrive(name, SHORT)
        shell.token(name, 5)
    shell.order(Layout(((0, 1), (2,), (3,))), "migrate")
    shell.arrive("new", SHORT)
    assert shell.dispatched == []
    shell.regroup()
    assert [(name, group) for name, group in shell.dispatched if name in "ab"] == [
        ("a", (0, 1)),
        ("b", (0, 1)),
    ]
    assert shell.open["new"].group is not None
    assert shell.controller.changeover.is_under_way
    shell.acknowledge()
    assert not shell.controller.changeover.is_under_way
    shell.settle(3)


def test_after_a_failed_switch_the_server_goes_on() -> None:
    """Requests go to the new layout, another switch may be made."""
    shell = ModelShell(settings("manual", 2, max_num_seqs=1))
    for name in "ab":
        shell.arrive(name, SHORT)
    shell.order(WIDE)
    shell.arrive("long", RequestSpec(100, 150, 50))
    shell.fail()
    assert shell.switches[0].problem == "engine 1 did not answer"
    assert not shell.controller.changeover.is_under_way
    shell.order(NARROW)
    shell.acknowledge()
    shell.finish("long")
    shell.settle(5)
