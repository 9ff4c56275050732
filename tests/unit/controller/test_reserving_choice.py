"""ReservingChoice under policy `gyges`: fewest switches, and nobody waits for ever."""

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.reservation import PATIENCE_S
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell

LONG = RequestSpec(120, 150, 30)
SHORT = RequestSpec(10, 20, 10)


def gyges(engines: int = 4) -> ModelShell:
    """Return engines of 100 tokens each, whose KV migrates."""
    shell = ModelShell(settings("gyges", engines))
    shell.controller.state.migrates = dict.fromkeys((2, 4), MigrationCost(0.0005, 1e-6))
    return shell


def joined(shell: ModelShell) -> int:
    """Return how many switches have made a group."""
    return sum(len(switch.new.groups) < len(switch.old.groups) for switch in shell.switches)


def with_long(spec: RequestSpec, engines: int = 4) -> ModelShell:
    """Return a server on which a group computes a long request."""
    shell = gyges(engines)
    shell.arrive("long", spec)
    shell.acknowledge()
    shell.token("long")
    group = shell.open["long"].group
    assert group is not None
    assert len(group) > 1
    return shell


def test_a_second_long_request_goes_to_the_group_that_is_wide() -> None:
    """No second transformation, though its engines have more to do than others: the paper's figure
    13.
    """
    shell = with_long(RequestSpec(210, 230, 20), engines=8)
    shell.arrive("second", RequestSpec(101, 110, 9))
    shell.tick()
    assert shell.open["second"].group == shell.open["long"].group
    assert joined(shell) == 1
    shell.settle(5)


def test_another_group_is_formed_if_the_first_has_no_room() -> None:
    shell = with_long(RequestSpec(210, 230, 20), engines=8)
    shell.arrive("other", RequestSpec(210, 230, 20))
    shell.tick()
    shell.acknowledge()
    assert joined(shell) == 2
    assert shell.open["other"].group not in (None, shell.open["long"].group)
    shell.settle(9)


def test_engines_part_when_the_long_request_is_over() -> None:
    shell = with_long(LONG)
    shell.finish("long")
    shell.tick()
    shell.acknowledge()
    assert shell.layout == Layout.uniform(4, 1)
    decision = shell.switches[-1].decision
    assert decision is not None
    assert decision.reason.startswith("no long request in group")


def test_short_requests_go_where_least_memory_is_in_use() -> None:
    shell = gyges()
    for number in range(4):
        shell.arrive(str(number), RequestSpec(10 + number, 20 + number, 10))
    assert sorted(one.group for one in shell.open.values()) == [(0,), (1,), (2,), (3,)]
    shell.arrive("more", SHORT)
    assert shell.open["more"].group == shell.open["0"].group


def test_short_requests_wait_for_the_kept_room_for_their_patience() -> None:
    """Two engines are full, the others keep room for a long request."""
    shell = with_long(LONG)
    shell.finish("long")
    shell.tick()
    shell.acknowledge()
    shell.tick()
    busy = 0
    while not shell.waiting():
        shell.arrive(f"short {busy}", RequestSpec(60, 90, 30))
        busy += 1
        assert busy < 10
    kept = shell.controller.state.reservation.group
    assert len(kept) == 2
    assert all(one.group not in ((kept[0],), (kept[1],)) for one in shell.open.values())
    shell.tick(PATIENCE_S)
    assert not shell.waiting()


def test_short_requests_wait_for_no_room_that_all_engines_would_keep() -> None:
    shell = with_long(LONG, engines=2)
    shell.finish("long")
    shell.tick()
    shell.acknowledge()
    for number in range(2):
        shell.arrive(str(number), RequestSpec(60, 90, 30))
    assert not shell.waiting()
    assert shell.controller.state.reservation.group == ()


def test_a_group_of_all_engines_parts_though_short_requests_come() -> None:
    """Only as many begin there as engines alone have room for. Before, it was full."""
    shell = with_long(RequestSpec(210, 230, 20))
    for number in range(3):
        shell.arrive(f"beside {number}", RequestSpec(30, 50, 20))
        shell.token(f"beside {number}")
    # the most requests of a group run there, and all the time others wait
    for number in range(9):
        shell.arrive(f"short {number}", RequestSpec(60, 90, 30))
    shell.finish("long")
    for _ in range(9):
        shell.tick()
        if shell.ordered is not None:
            break
        shell.finish(shell.running()[0])
    assert shell.layout == Layout.uniform(4, 1)
    shell.settle(60)


@pytest.mark.parametrize("engines", [2, 4, 8])
def test_older_short_requests_do_not_fill_the_group_of_a_long_one(engines: int) -> None:
    """They have lost their patience. Of four engines all may join for it. It begins as soon as its
    group is there.
    """
    shell = gyges(engines)
    busy = 0
    while len(shell.waiting()) < 4:
        shell.arrive(f"short {busy}", RequestSpec(60, 90, 30))
        busy += 1
    shell.tick(PATIENCE_S)
    shell.arrive("long", LONG)
    for _ in range(40):
        if shell.ordered is not None:
            shell.acknowledge()
        if "long" in shell.running():
            break
        running = [name for name in shell.running() if len(shell.open[name].group or ()) == 1]
        for name in running[:1]:
            shell.token(name, 10_000)
        beside = [name for name in shell.running() if len(shell.open[name].group or ()) > 1]
        assert beside == []
        shell.tick()
    assert "long" in shell.running()
    shell.settle(60)


def test_short_requests_go_beside_a_long_one_as_soon_as_it_has_begun() -> None:
    """In the same turn, though they came before it."""
    shell = ModelShell(settings("gyges", 4, max_num_batched_tokens=512))
    shell.order(Layout.uniform(4, 4))
    shell.acknowledge()
    shell.arrive("old", RequestSpec(30, 40, 10))
    shell.arrive("full", RequestSpec(60, 90, 30))
    shell.arrive("long", RequestSpec(270, 300, 30))
    shell.arrive("short", SHORT)
    assert shell.waiting() == ["long", "short"]
    shell.tick(PATIENCE_S)
    assert shell.waiting() == ["long", "short"]
    shell.finish("full")
    assert shell.waiting() == []


def test_a_long_request_does_not_wait_for_short_ones_before_it() -> None:
    shell = gyges()
    for number in range(20):
        shell.arrive(str(number), RequestSpec(60, 90, 30))
    assert shell.waiting()
    shell.arrive("long", LONG)
    shell.tick()
    assert shell.controller.changeover.is_under_way
    decision = shell.controller.decider.last
    assert decision is not None
    assert decision.reason.startswith("context")
    shell.settle(60)
    assert not shell.open


def test_a_group_lends_its_weights_for_one_more_long_request() -> None:
    """No other engines join for it. The weights are back before the group parts."""
    shell = ModelShell(settings("gyges", 4, lends=True))
    shell.controller.state.migrates = dict.fromkeys((2, 4), MigrationCost(0.0005, 1e-6))
    group = (0, 1, 2, 3)
    for name in ("long", "other"):
        shell.arrive(name, RequestSpec(210, 230, 20))
        if name == "long":
            shell.acknowledge()
        shell.token("long")
    assert shell.weights[group] == "lending"
    shell.answer_weights(group)
    assert shell.open["other"].group == group
    assert joined(shell) == 1
    shell.finish("long", "other")
    shell.tick()
    assert shell.weights[group] == "fetching"
    assert shell.layout == Layout.uniform(4, 4)
    shell.answer_weights(group)
    shell.acknowledge()
    assert shell.layout == Layout.uniform(4, 1)


def test_a_group_that_is_full_of_short_requests_lends_for_a_long_one() -> None:
    """Before, it lent only beside a long request that ran there."""
    shell = ModelShell(settings("gyges", 4, lends=True))
    shell.controller.state.migrates = dict.fromkeys((2, 4), MigrationCost(0.0005, 1e-6))
    shell.order(Layout.uniform(4, 4))
    shell.acknowledge()
    for number in range(2):
        shell.arrive(str(number), RequestSpec(60, 99, 39))
        shell.token(str(number))
    shell.arrive("long", RequestSpec(270, 300, 30))
    assert shell.weights[(0, 1, 2, 3)] == "lending"
