"""When weights are lent and called back. Under any events: test_controller_machine.py."""

import pytest

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.rooms import Rooms
from flying_serving.controller.snapshots import snapshot
from flying_serving.controller.weight_lending import TRANSITIONS, LendingPhase, WeightLending
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell

GROUP = (0, 1, 2, 3)
TOGETHER, APART = Layout.uniform(4, 4), Layout.uniform(4, 1)
LONG, SHORT, OPEN_ENDED = (
    RequestSpec(450, 500, 50),
    RequestSpec(10, 30, 20),
    RequestSpec(390, 391, 300),
)
"""A group of four holds 400 tokens, and 700 with lent weights."""


def together(policy: str = "manual") -> ModelShell:
    """Return four engines in one group, which may lend its weights."""
    shell = ModelShell(settings(policy, 4, lends=True))
    shell.controller.state.migrates = dict.fromkeys((1, 2, 4), MigrationCost(0.0005, 1e-6))
    shell.order(TOGETHER)
    shell.acknowledge()
    return shell


def lent() -> ModelShell:
    """Return these with lent weights and a long request in the group."""
    shell = together()
    shell.arrive("long", LONG)
    shell.answer_weights(GROUP)
    shell.token("long")
    return shell


def test_a_long_request_waits_for_weights_and_short_ones_go_on() -> None:
    shell = together()
    shell.arrive("long", LONG)
    assert shell.weights[GROUP] == "lending"
    shell.arrive("short", SHORT)
    assert shell.open["short"].group == GROUP
    assert shell.waiting() == ["long"]
    shell.answer_weights(GROUP)
    assert shell.dispatched == [("long", GROUP)]
    assert shell.open["long"].limit == 250


def test_weights_are_lent_only_when_narrower_groups_are_idle() -> None:
    """A request that an operator's switch has left behind goes first."""
    shell = ModelShell(settings("manual", 4, lends=True))
    shell.arrive("old", SHORT)
    shell.token("old", 5)
    shell.order(TOGETHER)
    shell.acknowledge()
    shell.arrive("long", LONG)
    assert shell.weights[GROUP] == "whole"
    shell.finish("old")
    assert shell.weights[GROUP] == "lending"


def test_an_order_waits_for_requests_that_need_the_room_then_for_weights() -> None:
    """Meanwhile the group has room for what it holds whole."""
    shell = lent()
    shell.order(APART)
    assert shell.ordered is None
    assert shell.weights[GROUP] == "lent"
    shell.arrive("short", SHORT)
    assert shell.open["short"].group == GROUP
    shell.arrive("longer", LONG)
    assert shell.waiting() == ["longer"]
    shell.finish("long")
    assert shell.ordered is None
    assert shell.weights[GROUP] == "fetching"
    shell.answer_weights(GROUP)
    assert shell.ordered is not None
    assert shell.waiting() == ["longer"]


def test_a_dropped_order_leaves_weights_lent() -> None:
    """As long as they were not on their way back."""
    shell = lent()
    shell.order(APART)
    shell.drop()
    shell.tick()
    assert shell.controller.state.weight_lending.phases[GROUP] is LendingPhase.LENT
    shell.arrive("longer", RequestSpec(100, 150, 50))
    assert shell.open["longer"].group == GROUP


def test_a_request_of_lower_degree_has_weights_come_back() -> None:
    shell = lent()
    shell.arrive("narrow", RequestSpec(10, 30, 20, degree=1))
    assert shell.waiting() == ["narrow"]
    shell.finish("long")
    assert shell.weights[GROUP] == "fetching"
    shell.answer_weights(GROUP)
    assert shell.dispatched == [("narrow", (0,))]


def test_weights_come_back_with_any_order() -> None:
    shell = lent()
    shell.finish("long")
    shell.arrive("narrow", RequestSpec(10, 30, 20, degree=1))
    shell.order(TOGETHER)
    assert shell.ordered is not None and shell.weights[GROUP] == "fetching"


def test_requests_without_a_loan_do_not_wait_for_one() -> None:
    shell = together()
    shell.arrive("narrow", RequestSpec(10, 30, 20, degree=1))
    shell.arrive("long", LONG)
    shell.arrive("wide", RequestSpec(250, 300, 50))
    assert shell.waiting() == ["long"]


def test_narrower_requests_after_a_long_one_wait_for_it() -> None:
    """Those before it go first, and as those that have begun, to their end."""
    shell = together()
    narrow = RequestSpec(10, 30, 20, degree=1)
    shell.arrive("before", narrow)
    shell.arrive("long", LONG)
    shell.arrive("after", narrow)
    shell.arrive("short", SHORT)
    assert shell.waiting() == ["long", "after"]
    shell.finish("before")
    assert shell.weights[GROUP] == "lending"
    shell.answer_weights(GROUP)
    assert shell.dispatched == [("long", GROUP)]
    shell.finish("long")
    assert shell.weights[GROUP] == "fetching"
    shell.arrive("longer", LONG)
    shell.answer_weights(GROUP)
    assert shell.dispatched[0] == ("after", (0,))
    assert shell.waiting() == ["longer"]


def test_urgent_narrower_requests_wait_for_a_long_one_that_is_overdue() -> None:
    shell, urgent = together(), RequestSpec(10, 30, 20, degree=1, priority=-1)
    shell.arrive("first", urgent)
    shell.arrive("long", LONG)
    shell.arrive("second", urgent)
    assert shell.waiting() == ["long"]
    shell.tick(31)
    shell.arrive("third", urgent)
    assert shell.waiting() == ["long", "third"]
    shell.finish("first", "second")
    assert shell.weights[GROUP] == "lending"


def test_weights_stay_lent_for_a_long_request_before_a_narrower_one() -> None:
    """It waits for room only, and has the weights called back when its turn comes."""
    shell = lent()
    shell.arrive("longer", LONG)
    shell.arrive("narrow", RequestSpec(10, 30, 20, degree=1))
    shell.tick()
    assert shell.waiting() == ["longer", "narrow"]
    shell.finish("long")
    assert shell.open["longer"].group == GROUP
    shell.tick()
    assert shell.controller.state.weight_lending.phases[GROUP] is LendingPhase.CLOSING


def test_a_request_without_limit_has_more_room_only_when_it_needs_it() -> None:
    """With its KV; a group that has lent its weights for others ends none early, and keeps none
    from coming back.
    """
    shell = lent()
    shell.finish("long")
    shell.arrive("open", OPEN_ENDED)
    assert shell.open["open"].limit == 10
    shell.token("open", 10)
    assert shell.open["open"].group == GROUP
    assert shell.open["open"].limit == 310


def test_a_degree_with_max_tokens_has_the_loan_that_it_may_need() -> None:
    """No other group can go on with it: without the loan it would end where the whole group is
    full.
    """
    shell = together()
    shell.arrive("degree", RequestSpec(40, 41, 560, 4, most_tokens=600))
    assert shell.weights[GROUP] == "lending"
    shell.answer_weights(GROUP)
    assert shell.open["degree"].limit == 660
    shell.token("degree", 559)
    assert shell.open["degree"].tokens == 559


def test_weights_come_back_for_any_expected_length() -> None:
    """No more is booked for it than it may have."""
    shell = lent()
    shell.finish("long")
    shell.arrive("open", RequestSpec(10, 11, 2000, expected_tokens=1900))
    shell.arrive("narrow", RequestSpec(10, 30, 20, degree=1))
    shell.tick()
    shell.tick()
    assert shell.weights[GROUP] == "fetching"


def test_engines_that_could_not_lend_have_weights_come_back() -> None:
    """All engines of the group are told; the request goes on waiting, and the next try follows."""
    shell = together()
    shell.arrive("long", LONG)
    shell.answer_weights(GROUP, complete=False)
    assert shell.weights[GROUP] == "fetching"
    shell.answer_weights(GROUP)
    assert shell.weights[GROUP] == "lending"


def test_weights_that_are_lent_come_back_only_when_fetched() -> None:
    shell = lent()
    with pytest.raises(RuntimeError, match=r"weights of group \[0, 1, 2, 3\]: from lent to whole"):
        shell.controller.weights_back(GROUP, shell.now_s)
    assert shell.controller.state.weight_lending.phases[GROUP] is LendingPhase.LENT


def test_weights_that_come_back_are_not_lent() -> None:
    shell = lent()
    shell.order(APART)
    shell.finish("long")
    with pytest.raises(RuntimeError, match="from fetching to lent"):
        shell.controller.weights_lent(GROUP, shell.now_s)


@pytest.mark.parametrize("phase", LendingPhase)
def test_every_phase_leads_back_to_whole_weights(phase: LendingPhase) -> None:
    reached = {phase}
    for _ in LendingPhase:
        reached |= {following for before in reached for following in TRANSITIONS[before]}
    assert LendingPhase.WHOLE in reached


def test_time_until_narrow_groups_open_is_the_last_measured() -> None:
    shell = together()

    def opens_in_s() -> float:
        state = shell.controller.state
        shot = snapshot(state, state.lane_figures(), shell.now_s)
        assert shot.closed_s(TOGETHER) == 0
        return round(shot.closed_s(APART), 3)

    shell.arrive("long", LONG)
    shell.tick(0.5)
    shell.answer_weights(GROUP)
    assert opens_in_s() == 0.5  # as lending took, before it is known
    shell.finish("long")
    shell.order(APART)
    shell.tick(2.0)
    shell.answer_weights(GROUP)
    assert opens_in_s() == 0
    shell.acknowledge()
    shell.order(TOGETHER)
    shell.acknowledge()
    shell.arrive("longer", LONG)
    shell.tick(0.2)
    assert opens_in_s() == 2.3
    shell.tick(0.3)
    shell.answer_weights(GROUP)
    assert opens_in_s() == 2.0
    shell.finish("longer")
    shell.order(APART)
    shell.tick(1.5)
    assert opens_in_s() == 0.5


def test_room_of_a_lending_group_excludes_its_long_requests() -> None:
    shell = lent()
    assert shell.controller.state.lane_figures()[4].kv_tokens == 700 - LONG.least_tokens
    shell.finish("long")
    assert shell.controller.state.lane_figures()[4].kv_tokens == 700
    assert shell.controller.state.lane_figures()[1].kv_tokens == 100


def test_auto_keeps_a_group_with_requests_that_need_the_room() -> None:
    """Whatever else waits: no other layout could go on with them."""
    shell = ModelShell(settings("auto", 4, lends=True))
    shell.arrive("long", LONG)
    for _ in range(4):
        if shell.ordered is not None:
            shell.acknowledge()
        for group in shell.going():
            shell.answer_weights(group)
        shell.tick()
    assert shell.open["long"].group == GROUP
    shell.token("long")
    for number in range(12):
        shell.arrive(f"short {number}", SHORT)
        shell.tick(0.2)
    assert shell.layout == TOGETHER
    shell.finish("long")
    shell.settle(40)


def test_of_two_groups_one_lends_for_one_request() -> None:
    """The other begins only if that is not enough."""
    shell = ModelShell(settings("manual", 8, lends=True))
    wide = Layout.uniform(8, max(shell.controller.settings.capacity.kv_tokens))
    shell.order(wide)
    shell.acknowledge()
    most = shell.controller.settings.capacity.kv_tokens[wide.widest]
    shell.arrive("long", RequestSpec(most, most + 50, 50))
    shell.tick()
    assert list(shell.weights.values()).count("lending") == 1


def test_the_group_lends_for_which_a_request_waits() -> None:
    """Not another one that might, too."""
    rooms = Rooms(settings("gyges", 8, lends=True).capacity, 8, loads := Loads())
    lending = WeightLending(rooms, loads)
    layout = Layout.uniform(8, 4)
    for awaited, lends in (((4, 5, 6, 7), True), ((0, 1), False)):
        rooms.awaited = {awaited}
        orders = lending.lend(layout, 0.0)
        assert [order.group for order in orders] == [awaited] * lends
        lending.phases = dict.fromkeys(lending.phases, LendingPhase.WHOLE)
