"""Engines that are lost while the layout is about to change, and requests that may be why."""

from dataclasses import replace

import pytest

from flying_serving.controller.commands import Fail
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from tests.controller.mortal import MortalShell
from tests.controller.shell import settings

SHORT = RequestSpec(10, 30, 20)
APART, PAIRS = Layout.uniform(4, 1), Layout.uniform(4, 2)
WITHOUT_LAST = Layout(((0, 1), (2,)))


def manual() -> MortalShell:
    """Return a server of four engines whose layout an operator chooses."""
    shell = MortalShell(settings("manual", 4))
    shell.controller.migrates = {2: MigrationCost(1e-4, 1e-7)}
    return shell


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
    assert shell.controller.layout == Layout(((0, 1), (2,), (3,)))
    shell.settle(5)


def test_a_layout_that_is_made_again_has_every_engine_that_is_back() -> None:
    """Also one that was lost when the layout was ordered."""
    shell = manual()
    shell.lose(0)
    shell.order(Layout(((1,), (2, 3))))
    shell.acknowledge()
    shell.lose(3)
    shell.revive(0)
    assert shell.ordered is None and shell.controller.layout == Layout(((0,), (1,), (2,)))
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
    assert (part.group, shell.open["a"].group) == ((0,), (1,))
    shell.lose(0)
    assert shell.open["a"].group == (1,) and shell.strikes == {"a": 1}
    shell.lose(1)
    assert shell.failed == ["a"]


def test_a_prefix_that_has_waited_behind_others_is_not_suspected() -> None:
    """As a whole prompt: no step can have computed it."""
    shell = MortalShell(settings("manual", 4, max_num_batched_tokens=16))
    shell.controller.migrates = {2: MigrationCost(1e-4, 1e-7)}
    for name in "abcdefghijkl":
        shell.arrive(name, replace(SHORT, prompt_tokens=24, split_at=20))
    prefixes = [part.request_id for part in shell.parts.values() if part.group == (0,)]
    assert len(prefixes) > 1
    shell.lose(0)
    assert shell.strikes.get(prefixes[0]) == 1 and prefixes[-1] not in shell.strikes
    assert shell.controller.started[prefixes[-1]].losses == 0


def test_engines_lost_with_both_halves_count_once() -> None:
    shell = manual()
    shell.order(PAIRS)
    shell.acknowledge()
    shell.arrive("a", replace(SHORT, split_at=5))
    groups = {part.group for part in shell.parts.values()} | {shell.open["a"].group}
    assert groups == set(PAIRS.groups)
    commands = shell.controller.engines_lost([0, 2], shell.now_s)
    assert not any(isinstance(one, Fail) for one in commands)
    (state,) = (*shell.controller.pool, *shell.controller.started.values())
    assert state.losses == 1
