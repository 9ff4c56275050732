"""Engines that are lost while the layout is about to change, and requests that may be why."""

from dataclasses import replace

import pytest

from flying_serving.controller.commands import Fail
from flying_serving.controller.fault_recovery import MOST_WAIT_S
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.model_settings import settings
from tests.unit.controller.mortal import MortalShell
from tests.unit.policy.costs import costs

SHORT, TINY = RequestSpec(10, 30, 20), RequestSpec(1, 2, 2)
APART, PAIRS = Layout.uniform(4, 1), Layout.uniform(4, 2)
WITHOUT_LAST = Layout(((0, 1), (2,)))


def manual() -> MortalShell:
    """Return a server of four engines whose layout an operator chooses."""
    shell = MortalShell(settings("manual", 4))
    shell.controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    return shell


LIKELY_WIDE = RequestSpec(40, 41, 120, expected_tokens=90, most_tokens=160)
"""An engine would hold it, but not what is expected of it."""


def test_no_expected_length_has_a_request_wait_for_a_lost_engine() -> None:
    """It goes on as one that arrives after the loss, on the engine that is left."""
    shell = MortalShell(settings("auto", 2), costs((1, 2), fixed=2.0, rest=1.5))
    shell.arrive("before", LIKELY_WIDE)
    shell.acknowledge()
    assert shell.open["before"].group == (0, 1)
    shell.lose(0)
    assert shell.open["before"].group == (1,)


def test_a_request_that_waits_when_an_engine_returns_is_sized_again() -> None:
    """As one that arrives after the return."""
    shell = MortalShell(settings("auto", 2, max_num_seqs=1), costs((1, 2), fixed=2.0, rest=1.5))
    shell.lose(0)
    shell.arrive("first", SHORT)
    shell.arrive("waits", LIKELY_WIDE)
    assert [state.sizes for state in shell.controller.state.pool] == [(1, 2)]
    shell.revive(0)
    assert [state.sizes for state in shell.controller.state.pool] == [(2,)]
    shell.settle(20)


@pytest.mark.parametrize("mode", ["sequential", "soft"])
def test_an_engine_that_returns_while_a_switch_waits_is_in_its_layout(mode: str) -> None:
    """The operator could not name it: it was lost."""
    shell = manual()
    shell.lose(3)
    for name in "abc":
        shell.arrive(name, SHORT)
    shell.order(WITHOUT_LAST, mode)
    assert shell.ordered is None
    shell.revive(3)
    for name in "defg":
        shell.arrive(name, SHORT)
        if mode == "soft":
            shell.token(name)
    for name in "abc":
        shell.finish(name)
    assert shell.ordered is not None
    shell.acknowledge()
    assert shell.controller.state.layout == Layout(((0, 1), (2,), (3,)))
    shell.settle(5)


def test_a_layout_that_is_made_again_has_every_engine_that_is_back() -> None:
    """Also one that was lost when the layout was ordered."""
    shell = manual()
    shell.lose(0)
    shell.order(Layout(((1,), (2, 3))))
    shell.acknowledge()
    shell.lose(3)
    shell.revive(0)
    assert shell.ordered is None and shell.controller.state.layout == Layout(((0,), (1,), (2,)))
    shell.revive(3)
    assert shell.ordered is not None and shell.ordered.new == Layout(((0,), (1,), (2, 3)))
    shell.acknowledge()
    shell.settle(1)


@pytest.mark.parametrize("ends", ["dropped", "failed by a loss"])
def test_an_order_that_is_not_made_replaces_no_layout_to_restore(ends: str) -> None:
    shell = manual()
    shell.order(PAIRS)
    shell.acknowledge()
    for name in "abcd":
        shell.arrive(name, SHORT)
        shell.token(name)
    shell.lose(1)
    shell.order(Layout(((0,), (2,), (3,))), "sequential")
    assert shell.ordered is None
    if ends == "dropped":
        shell.drop()
    else:
        shell.lose(0)
        shell.revive(0)
    shell.revive(1)
    assert shell.ordered is not None and shell.ordered.new == PAIRS
    shell.acknowledge()
    shell.settle(5)


def test_a_prompt_that_is_split_is_suspected_as_any_other() -> None:
    """Its prefix, too, may be what kills engines: it kills no more of them than a whole prompt."""
    shell = manual()
    shell.arrive("a", replace(SHORT, split_at=5))
    (part,) = shell.parts.values()
    assert part.group == (0,)
    assert shell.open["a"].group == (1,)
    shell.lose(0)
    assert shell.open["a"].group == (1,) and shell.strikes == {"a": 1}
    shell.lose(1)
    assert shell.failed == ["a"]


def test_a_prefix_that_has_waited_behind_others_is_not_suspected() -> None:
    """As a whole prompt: no step can have computed it."""
    shell = MortalShell(settings("manual", 4, max_num_batched_tokens=16))
    shell.controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    for name in "abcdefghijkl":
        shell.arrive(name, replace(SHORT, prompt_tokens=24, split_at=20))
    prefixes = [part.request_id for part in shell.parts.values() if part.group == (0,)]
    assert len(prefixes) > 1
    shell.lose(0)
    assert shell.strikes.get(prefixes[0]) == 1 and prefixes[-1] not in shell.strikes
    assert shell.controller.state.started[prefixes[-1]].losses == 0


def test_engines_lost_with_both_halves_count_once() -> None:
    shell = manual()
    shell.order(PAIRS)
    shell.acknowledge()
    shell.arrive("a", replace(SHORT, split_at=5))
    groups = {part.group for part in shell.parts.values()} | {shell.open["a"].group}
    assert groups == set(PAIRS.groups)
    commands = shell.controller.engines_lost([0, 2], shell.now_s)
    assert not any(isinstance(one, Fail) for one in commands)
    (state,) = (*shell.controller.state.pool, *shell.controller.state.started.values())
    assert state.losses == 1


# ---- requests that may be why


def crowded(engines: int = 2, count: int = 20) -> MortalShell:
    """Return a server with so many requests on each engine, none of which has a token."""
    shell = MortalShell(
        settings("auto", engines, max_num_seqs=128, max_num_batched_tokens=2048), costs(rest=1.5)
    )
    shell.controller.state.demand = shell.controller.state.lengths._demand = Demand((1.0, 1.0))
    while any(
        len(shell.controller.state.loads[group].requests) < count
        for group in Layout.uniform(engines, 1).groups
    ):
        shell.arrive(f"r{len(shell.open)}", TINY)
    return shell


def test_many_suspects_hold_no_other_request_up() -> None:
    """Half of them are tried at once, and who comes after them begins beside them."""
    shell = crowded()
    shell.lose(0)
    assert len(shell.dispatched) == 10
    shell.arrive("new", TINY)
    assert shell.open["new"].group == (1,)
    for name in shell.running():
        shell.token(name)
    shell.tick()
    assert shell.waiting() == []


def test_a_suspect_for_which_there_is_no_memory_is_not_starved() -> None:
    """What becomes free is kept for it, as for any other request."""
    shell = crowded(count=30)
    shell.lose(0)
    waits = shell.waiting()
    for number in range(200):
        shell.arrive(f"new{number}", TINY)
        running = [name for name in shell.running() if name not in waits]
        shell.token(running[0], 1000)
        for name in [one for one in waits if one in shell.running()]:
            shell.token(name)
    assert not set(waits) & set(shell.waiting())


@pytest.mark.parametrize("count", [1, 2, 3, 20, 40])
def test_a_deadly_prompt_fails_alone_and_soon(count: int) -> None:
    """Every group that it comes to is lost, and engines come back a little later. Others begin all
    the time.
    """
    shell = crowded(4, count)
    deadly, losses = next(iter(shell.open)), 0
    while deadly in shell.open:
        group = shell.open[deadly].group
        if group is None:
            shell.tick()
            continue
        losses += 1
        shell.arrive(f"late{losses}", TINY)
        shell.lose(group[0])
        for name in shell.running():
            if deadly not in shell.open or shell.open[name].group != shell.open[deadly].group:
                shell.token(name)
        for engine in sorted(shell.lost) if losses % 2 == 0 else ():
            shell.revive(engine)
    assert shell.failed == [deadly]
    assert losses <= max(2, (count + 1).bit_length())  # one came before the first loss


def test_a_first_kill_from_outside_makes_no_request_a_suspect() -> None:
    shell = crowded()
    shell.lose(0, killed=True)
    assert shell.waiting() == [] and not shell.company
    shell.revive(0)
    other = next(iter(shell.open))
    engine = (shell.open[other].group or ())[0]
    shell.lose(engine, killed=True)
    assert shell.company[other] > 0 and len(shell.company) < len(shell.open)


@pytest.mark.parametrize("is_revived", [True, False])
def test_after_two_losses_a_suspect_does_not_get_the_last_engine(is_revived: bool) -> None:
    """It waits for another, and fails if none is back in time; others run meanwhile."""
    shell = crowded(4, 16)
    deadly = next(iter(shell.open))
    for _ in range(3):
        (engine,) = shell.open[deadly].group or ()
        for name in shell.running():
            if shell.open[name].group != (engine,):
                shell.token(name)
        shell.lose(engine)
    assert shell.open[deadly].group is None
    shell.arrive("new", TINY)
    assert shell.open["new"].group is not None
    if is_revived:
        shell.revive(min(shell.lost))
        assert shell.open[deadly].group is not None
    else:
        shell.tick(MOST_WAIT_S)
        assert deadly not in shell.failed
        shell.tick(0.1)
        assert deadly in shell.failed


def test_a_suspect_that_waits_for_room_outlives_the_loss_of_another_engine() -> None:
    """However long it has waited by then: there are engines that it may have."""
    shell = MortalShell(settings("manual", 4))
    for number in range(16):
        shell.arrive(f"r{number}", TINY)
    for name in shell.running():
        if shell.open[name].group != (0,):
            shell.token(name)
    for _ in range(2):
        shell.lose(0)
        shell.revive(0)
    waits = [name for name in shell.waiting() if shell.strikes[name] == 2]
    assert waits
    shell.tick(MOST_WAIT_S + 1)
    shell.lose(3)
    shell.tick()
    assert shell.failed == []


def test_a_suspect_may_have_the_engine_that_it_was_on_once_that_is_back() -> None:
    """The others are busy, and may be for long."""
    shell = MortalShell(settings("manual", 4, max_num_seqs=1))
    for number in range(4):
        shell.arrive(f"r{number}", SHORT)
    for number in range(1, 4):
        shell.token(f"r{number}")
    shell.lose(0)
    assert shell.waiting() == ["r0"]
    shell.revive(0)
    assert shell.open["r0"].group == (0,)


def test_a_group_that_is_made_again_does_not_get_its_suspect_again() -> None:
    """Though another engine has given it tokens since: it would lose the engine each time."""
    shell = MortalShell(settings("manual", 2))
    shell.controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    both, losses = Layout.uniform(2, 2), 0
    shell.arrive("deadly", replace(SHORT, max_output_tokens=60))
    shell.token("deadly")
    for _ in range(4):
        shell.order(both, "migrate")
        shell.acknowledge()
        if shell.open["deadly"].group == (0, 1):
            losses += 1
            shell.lose(1)
            shell.token("deadly")
            shell.revive(1)
            if shell.ordered is not None:
                shell.acknowledge()
        shell.token("deadly")
        shell.order(Layout.uniform(2, 1), "migrate")
        shell.acknowledge()
    assert losses == 1
    shell.finish("deadly")


@pytest.mark.parametrize(
    ("policy", "dry_run", "restored"),
    [("auto", False, None), ("auto", True, APART), ("manual", False, APART)],
)
def test_a_layout_is_restored_only_where_no_policy_chooses_one(
    policy: str, dry_run: bool, restored: Layout | None
) -> None:
    """After a second loss, too, it is that before the first; and only once."""
    shell = MortalShell(settings(policy, 4, dry_run=dry_run), costs((1, 2, 4)))
    for engine in (3, 0):
        shell.lose(engine)
        assert shell.controller.state.to_restore == restored
    for engine in (0, 3):
        shell.revive(engine)
    assert shell.controller.state.to_restore is None
