"""Controller: which requests leave their group for another one, and with which tokens and KV."""

from dataclasses import replace

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.examples import NARROW, OPEN_ENDED, SHORT, WIDE, manual
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs


def test_prompts_that_are_not_begun_go_to_the_new_layout_at_once() -> None:
    """All but those that the step under way may have, and those that asked for a degree."""
    shell = manual()
    for name in ("a", "b", "c", "d", "e", "f"):
        shell.arrive(name, RequestSpec(40, 60, 20, degree=1 if name == "f" else None))
    assert [shell.open[name].group for name in "abcdef"] == [(0,), (1,)] * 3
    shell.order(WIDE, "weave")
    assert shell.dispatched == [("e", (0, 1))]
    assert shell.controller.state.switches._open[0].draining == set("abcdf")


def test_prompts_that_the_new_layout_does_not_hold_stay() -> None:
    """They are done where they are."""
    shell = manual()
    shell.order(WIDE)
    shell.acknowledge()
    for name, tokens in (("a", 150), ("b", 150), ("c", 50)):
        shell.arrive(name, RequestSpec(tokens - 10, tokens, 10))
    shell.order(NARROW)
    assert [name for name, _ in shell.dispatched] == ["c"]
    assert shell.open["b"].group == (0, 1)


def test_migrate_takes_along_streams_that_fit_and_can_migrate() -> None:
    """What has grown beyond one engine stays in the old group, however small it began."""
    shell = manual()
    shell.order(WIDE)
    shell.acknowledge()
    for name, spec in {
        "short": SHORT,
        "grown": OPEN_ENDED,
        "fixed": RequestSpec(10, 30, 20, can_migrate=False),
    }.items():
        shell.arrive(name, spec)
    shell.token("short", 3)
    shell.token("grown", 100)
    shell.token("fixed", 3)
    shell.order(NARROW, "migrate")
    shell.acknowledge()
    assert [name for name, _ in shell.dispatched] == ["short"]
    assert shell.open["grown"].group == shell.open["fixed"].group == (0, 1)
    assert shell.open["short"].tokens == 3
    assert shell.controller.state.switches._open[-1].draining == {"grown", "fixed"}


def test_migrating_request_keeps_the_tokens_of_the_step_under_way() -> None:
    """It continues when the engines have answered, after that step, and before requests that arrive
    meanwhile.
    """
    shell = manual()
    for name, spec in {"streams": SHORT, "ends": SHORT}.items():
        shell.arrive(name, spec)
        shell.token(name, 3)
    shell.order(WIDE, "migrate")
    assert shell.dispatched == []
    assert shell.open["streams"].group == (0,)
    shell.arrive("new", SHORT)
    shell.token("streams")
    shell.token("ends", 17)
    shell.tick()
    assert shell.waiting() == ["new"]
    shell.acknowledge()
    assert shell.dispatched == [("streams", (0, 1)), ("new", (0, 1))]
    assert shell.open["streams"].tokens == 4


def test_requests_stay_if_engines_do_not_answer_the_order() -> None:
    """Running requests stay in their groups; those that arrived meanwhile are not forgotten."""
    shell = manual()
    shell.arrive("streams", SHORT)
    shell.token("streams", 3)
    shell.order(WIDE, "migrate")
    shell.arrive("new", SHORT)
    shell.fail()
    shell.tick()
    assert shell.open["streams"].group == (0,)
    assert shell.open["new"].group == (0, 1)


def test_kv_migrates_where_the_migration_was_measured() -> None:
    """Then one token is to be computed; prompts that may be done in part count in full, those not
    begun have no KV.

    KV that arrived with a request migrates on with it, whether the request has run there or not.
    """
    shell = manual()
    shell.controller.state.migrates = {2: MigrationCost(0.002, 1e-5)}
    for name in "abcdef":
        shell.arrive(name, RequestSpec(40, 60, 20))
    shell.token("a", 3)
    shell.order(WIDE, "migrate")
    shell.acknowledge()
    to_compute = {
        name: (stream.arrived_with_kv, stream.ahead) for name, stream in shell.open.items()
    }
    begun, not_begun = (True, 40), (False, 40)
    assert to_compute == {
        "a": (True, 1),
        "b": begun,
        "c": begun,
        "d": begun,
        "e": begun,
        "f": not_begun,
    }
    shell.order(NARROW, "migrate")
    shell.acknowledge()
    assert {name for name, stream in shell.open.items() if stream.arrived_with_kv} == set("abcde")
    assert shell.open["a"].ahead == 1


@pytest.mark.parametrize("measured", [(), (2,)])
def test_kv_migrates_between_any_groups_once_a_migration_was_measured(
    measured: tuple[int, ...],
) -> None:
    """From an engine to a pair elsewhere too, though only those of a pair were measured."""
    shell = ModelShell(settings("manual", 4, capped=False))
    shell.controller.state.migrates = dict.fromkeys(measured, MigrationCost(0.002, 1e-5))
    shell.order(Layout(((0, 1), (2,), (3,))))
    shell.acknowledge()
    shell.arrive("a", RequestSpec(10, 150, 140))
    shell.token("a", 5)
    shell.order(Layout(((0,), (1,), (2, 3))), "migrate")
    shell.acknowledge()
    assert shell.dispatched == [("a", (2, 3))]
    assert shell.open["a"].arrived_with_kv == bool(measured)
    assert shell.open["a"].ahead == (1 if measured else 15)


@pytest.mark.parametrize("measured", [(), (2, 4)])
def test_a_request_that_exceeds_its_groups_kv_goes_on_with_it(measured: tuple[int, ...]) -> None:
    """The group has ended it, and offers its KV if that can migrate; else it is prefilled again."""
    shell = ModelShell(settings("manual", 4))
    shell.controller.state.migrates = dict.fromkeys(measured, MigrationCost(0.002, 1e-5))
    shell.arrive("grows", OPEN_ENDED)
    shell.order(Layout(((0,), (1,), (2, 3))))
    shell.token("grows", 60)
    assert shell.dispatched == [("grows", (2, 3))]
    assert shell.open["grows"].arrived_with_kv == bool(measured)
    assert shell.open["grows"].ahead == (1 if measured else 100)


@pytest.mark.parametrize("aborted", [True, False])
def test_recalled_requests_that_end_leave_the_switch(aborted: bool) -> None:
    """They have streamed, and were taken from their engines to pairs that have no room for all: the
    switch is over.
    """
    shell = ModelShell(settings("priority"))
    names = [f"r{number}" for number in range(16)]
    for name in names:
        shell.arrive(name, RequestSpec(10, 20, 10))
        shell.token(name)
    assert shell.waiting() == []
    shell.order(Layout.uniform(4, 2), "migrate")
    shell.acknowledge()
    assert len(shell.waiting()) == 8
    switch = shell.switches[0]
    assert shell.controller.state.switches._open[0].migrating == set(names)
    shell.finish(*names, aborted=aborted)
    assert shell.streams_of_switches() == set()
    assert not switch.open


@pytest.mark.parametrize("is_full", [False, True])
def test_an_urgent_request_stays_where_it_runs_if_it_would_wait(is_full: bool) -> None:
    """Otherwise it migrates as all do."""
    shell = ModelShell(settings("priority", engines=2, max_num_seqs=1))
    for name in ("a", "b"):
        shell.arrive(name, SHORT)
        shell.token(name)
    shell.order(WIDE)
    shell.acknowledge()
    shell.arrive("urgent", RequestSpec(10, 20, 10, priority=-1))
    shell.token("urgent")
    if not is_full:
        shell.finish("a")
    shell.order(NARROW, "migrate")
    shell.acknowledge()
    assert shell.open["urgent"].group == ((0, 1) if is_full else (0,))
    assert shell.waiting() == []


def test_request_that_ends_after_its_group_was_full_leaves_the_switch() -> None:
    """It waits for a wider one then."""
    shell = ModelShell(settings(engines=2, max_num_seqs=1))
    for name in "ab":
        shell.arrive(name, replace(OPEN_ENDED, expected_tokens=20))
    shell.token("a", 1000)
    assert shell.waiting() == ["a"]
    shell.finish("a", aborted=True)
    assert "a" not in shell.streams_of_switches()


@pytest.mark.parametrize(
    ("policy", "migrates"), [("auto", True), ("load", True), ("manual", False)]
)
def test_request_left_behind_migrates_when_its_prompt_is_done(policy: str, migrates: bool) -> None:
    """With its KV, if that is cheaper than weaving it in to its end; an operator's layout changes
    nothing by itself.

    A request that may not migrate stays.
    """
    shell = ModelShell(settings(policy, 2, max_num_seqs=64), costs(fixed=1.5, rest=1.3))
    shell.controller.state.migrates = {2: MigrationCost(0.002, 1e-6)}
    shell.order(WIDE)
    shell.acknowledge()
    fixed, degree = RequestSpec(10, 60, 50, can_migrate=False), RequestSpec(10, 40, 30, degree=2)
    for name, spec in {"left": RequestSpec(10, 60, 50), "fixed": fixed, "degree": degree}.items():
        shell.arrive(name, spec)
        shell.token(name, 3)
    if not shell.controller.changeover.is_under_way:
        shell.order(NARROW)
    shell.acknowledge()
    shell.tick()
    where = {name: len(stream.group or ()) for name, stream in shell.open.items()}
    assert where == {"left": 1 if migrates else 2, "fixed": 2, "degree": 2}
    assert shell.open["left"].arrived_with_kv == migrates
    shell.tick()
    assert shell.dispatched == []
    shell.settle(5)
