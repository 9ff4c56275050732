"""Controller: what it does at each event. Whatever sequence of events there is: test_machine.py."""

from dataclasses import replace

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.errors import PoolFull
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import Step
from tests.controller.model_shell import ModelShell, settings
from tests.policy.costs import costs, measured

NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
SHORT = RequestSpec(10, 30, 20)
OPEN_ENDED = RequestSpec(40, 41, 400)


def manual(capped: bool = False) -> ModelShell:
    """Return a server of two engines whose layout an operator chooses."""
    return ModelShell(settings("manual", 2, capped=capped))


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
    switch = shell.controller.waits_for_idle
    assert switch is not None
    shell.drop()
    assert shell.waiting() == []
    assert shell.open["b"].group in NARROW.groups
    assert (switch.problem, switch.cutover_ms, switch.open) == ("cancelled", None, False)
    shell.order(WIDE, "weave")
    assert shell.controller.waits_for_idle is None
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
    shell.carry_out(shell.controller.order(WIDE, mode, None, shell.now_s, decision)[1])
    shell.arrive("c", SHORT)
    shell.tick(0.5)
    assert shell.ordered is None
    shell.tick(0.5)
    assert shell.ordered is not None
    assert shell.ordered.mode in ("weave", "hard", "migrate")
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
    assert shell.controller.changing
    shell.acknowledge()
    assert not shell.controller.changing
    shell.settle(3)


def test_prompts_that_are_not_begun_go_to_the_new_layout_at_once() -> None:
    """All but those that the step under way may have, and those that asked for a degree."""
    shell = manual()
    for name in ("a", "b", "c", "d", "e", "f"):
        shell.arrive(name, RequestSpec(40, 60, 20, degree=1 if name == "f" else None))
    assert [shell.open[name].group for name in "abcdef"] == [(0,), (1,)] * 3
    shell.order(WIDE, "weave")
    assert shell.dispatched == [("e", (0, 1))]
    assert shell.switches[0].draining == set("abcdf")


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
    assert shell.switches[-1].draining == {"grown", "fixed"}


def test_what_migrates_keeps_the_tokens_of_the_step_under_way() -> None:
    """It continues when the engines have answered, after that step, and before requests that arrive
    meanwhile.
    """
    shell = manual()
    for name, spec in {"streams": SHORT, "ends": SHORT}.items():
        shell.arrive(name, spec)
        shell.token(name, 3)
    shell.order(WIDE, "migrate")
    assert (shell.dispatched, shell.open["streams"].group) == ([], (0,))
    shell.arrive("new", SHORT)
    shell.token("streams")
    shell.token("ends", 17)
    shell.tick()
    assert shell.waiting() == ["new"]
    shell.acknowledge()
    assert shell.dispatched == [("streams", (0, 1)), ("new", (0, 1))]
    assert shell.open["streams"].tokens == 4


def test_nothing_migrates_if_engines_do_not_answer() -> None:
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
    expected = (True, 1) if measured else (False, 100)
    assert (shell.open["grows"].arrived_with_kv, shell.open["grows"].ahead) == expected


@pytest.mark.parametrize("aborted", [True, False])
def test_nothing_is_left_of_requests_that_end_while_they_wait_to_go_on(aborted: bool) -> None:
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
    assert switch.migrating == set(names)
    shell.finish(*names, aborted=aborted)
    assert shell.streams_of_switches() == set()
    assert not switch.open


def test_nothing_is_left_of_a_request_that_ends_after_its_group_was_full() -> None:
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
def test_what_is_left_behind_migrates_when_its_prompt_is_done(policy: str, migrates: bool) -> None:
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
    if not shell.controller.changing:
        shell.order(NARROW)
    shell.acknowledge()
    shell.tick()
    where = {name: len(stream.group or ()) for name, stream in shell.open.items()}
    assert where == {"left": 1 if migrates else 2, "fixed": 2, "degree": 2}
    assert shell.open["left"].arrived_with_kv == migrates
    shell.tick()
    assert shell.dispatched == []
    shell.settle(5)


def test_after_a_failed_switch_the_server_goes_on() -> None:
    """Requests go to the new layout, another switch may be made."""
    shell = ModelShell(settings("manual", 2, max_num_seqs=1))
    for name in "ab":
        shell.arrive(name, SHORT)
    shell.order(WIDE)
    shell.arrive("long", RequestSpec(100, 150, 50))
    shell.fail()
    assert shell.switches[0].problem == "engine 1 did not answer"
    assert not shell.controller.changing
    shell.order(NARROW)
    shell.acknowledge()
    shell.finish("long")
    shell.settle(5)


HURRIED = RequestSpec(10, 30, 20, deadline_s=1.0)


def test_a_request_that_waits_beyond_its_deadline_is_refused_once() -> None:
    """Not before, and not if it has begun by then."""
    shell = ModelShell(settings("static-dp", 2))
    shell.controller.choice.limits = settings(max_num_seqs=1).limits
    for name in "ab":
        shell.arrive(name, SHORT)
    shell.arrive("late", HURRIED)
    shell.arrive("lucky", replace(HURRIED, priority=-1))
    shell.tick(0.9)
    assert shell.refused == []
    shell.finish("a")
    assert shell.waiting() == ["late"]
    shell.begin("lucky")
    shell.tick(0.2)
    assert shell.refused == ["late"]
    shell.tick(10.0)
    shell.finish("b")
    assert shell.refused == ["late"]
    assert shell.running() == ["lucky"]


@pytest.mark.parametrize("policy", ["manual", "static-dp", "static-tp", "auto", "split"])
def test_a_deadline_counts_in_the_queue_of_an_engine(policy: str) -> None:
    """Until a scheduler has the request in a step; what is dispatched later may have its place."""
    shell = ModelShell(settings(policy, 2, capped=policy == "auto"))
    for name in ("late", "begun"):
        shell.arrive(name, HURRIED)
    assert shell.waiting() == []
    shell.begin("begun")
    shell.tick(0.9)
    assert shell.refused == []
    shell.tick(0.2)
    assert shell.refused == ["late"]
    assert shell.controller.state.running == 1
    assert "late" not in shell.controller.state.loads.unfinished


def test_a_first_token_meets_a_deadline() -> None:
    shell = manual()
    shell.arrive("a", HURRIED)
    shell.token("a")
    shell.tick(2.0)
    assert shell.refused == []


@pytest.mark.parametrize("begins", [False, True])
def test_a_recalled_request_keeps_its_deadline_until_it_begins(begins: bool) -> None:
    """In its old group or in the new one, or in the pool between."""
    shell = manual()
    shell.arrive("a", HURRIED)
    if begins:
        shell.begin("a")
    shell.order(WIDE, "migrate")
    shell.acknowledge()
    assert shell.open["a"].group == (0, 1)
    shell.tick(1.1)
    assert shell.refused == ([] if begins else ["a"])


@pytest.mark.parametrize("at", [5, 20], ids=["in the prompt", "in the output"])
def test_a_late_request_that_two_groups_share_leaves_both(at: int) -> None:
    shell = manual()
    shell.controller.state.migrates = {1: MigrationCost(0.001, 1e-6)}
    shell.arrive("a", replace(HURRIED, split_at=at))
    assert len(shell.parts) == 1
    shell.tick(1.1)
    assert shell.refused == ["a"]
    assert shell.parts == {}
    assert not shell.controller.state.loads.groups


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
    assert not shell.controller.changing
    shell.finish("a", "b")
    assert shell.waiting() == ["long", "e"]
    shell.tick()
    assert shell.controller.changing
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


def test_nobody_waits_for_a_group_that_is_not_formed() -> None:
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


@pytest.mark.parametrize("policy", ["auto", "priority"])
def test_an_urgent_request_gets_a_group_at_once(policy: str) -> None:
    """Others keep running, engines are left for them, and new ones go there."""
    shell = ModelShell(settings(policy, 4), costs((1, 2, 4), fixed=0.9, rest=0.95))
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


def test_a_dry_run_only_says_what_it_would_do() -> None:
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
    assert shell.controller.changing == at_arrival
    shell.tick()
    assert shell.controller.changing


@pytest.mark.parametrize("long", [RequestSpec(10, 180, 170), RequestSpec(150, 180, 30)])
def test_a_long_request_is_not_starved_by_short_ones(long: RequestSpec) -> None:
    """However many come after it: they leave it the memory that it waits for, and its turn to be
    prefilled.
    """
    shell = ModelShell(settings("manual", 2, max_num_seqs=20, max_num_batched_tokens=32))
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
            shell.token(name)
            shell.finish(name, aborted=True)  # so that expected lengths stay as they are
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
    """In pairs whose memory is always full of short requests; one that is wider has its place ten
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
