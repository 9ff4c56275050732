"""Requests that two groups share: where they are split, how they go on there, and what undoes
it.
"""

from dataclasses import replace

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.examples import roomy
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.controller.model_streams import Part

PROMPT, OUTPUTS = 40, 20
ASKED = RequestSpec(PROMPT, PROMPT + OUTPUTS, OUTPUTS)
APART, PAIRS = Layout.uniform(4, 1), Layout.uniform(4, 2)
QUICK = {2: MigrationCost(1e-4, 1e-7)}


def shell_of(policy: str = "manual", engines: int = 4) -> ModelShell:
    """Return a server on which KV migrates."""
    shell = ModelShell(settings(policy, engines))
    shell.controller.state.migrates = dict(QUICK)
    return shell


LONG, BRIEF = RequestSpec(1500, 1520, 20), RequestSpec(100, 120, 20)


def busy(
    policy: str, *, others: int = 2, spec: RequestSpec = LONG, dry_run: bool = False
) -> ModelShell:
    """Return a server of two roomy engines, where other requests have prompts to compute when one
    arrives.
    """
    shell = roomy(policy, dry_run=dry_run)
    for number in range(others):
        shell.arrive(f"r{number}", RequestSpec(1000, 1300, 300, degree=1))
    shell.arrive("new", spec)
    return shell


def split(at: int, shell: ModelShell | None = None, name: str = "a") -> ModelShell:
    """Return a server that has got a request which asks to be split there."""
    shell = shell or shell_of()
    shell.arrive(name, replace(ASKED, split_at=at))
    return shell


def part_of(shell: ModelShell) -> Part | None:
    """The only part that groups have, if they have any."""
    (part,) = shell.parts.values() or [None]
    return part


@pytest.mark.parametrize("at", [1, 16, 39])
def test_inside_the_prompt_the_first_group_gets_a_prefix(at: int) -> None:
    """The second has the request at once, and computes the rest of its prompt."""
    shell = split(at)
    assert part_of(shell) == Part("a", (0,), at, is_ahead=False)
    assert shell.open["a"].group == (1,)
    loads = shell.controller.state.loads
    assert [loads[group].prefill_tokens for group in ((0,), (1,))] == [at, PROMPT - at]
    shell.end_prefix(1)
    assert shell.open["a"].group == (1,)
    assert loads[(0,)].requests == {}
    shell.settle(2)


@pytest.mark.parametrize("at", [40, 41, 58])
def test_behind_the_prompt_the_second_group_pulls_ahead(at: int) -> None:
    """And goes on as soon as the first has given all tokens but the one that it needs no KV of."""
    shell = split(at)
    stream, tokens = shell.open["a"], at + 1 - PROMPT
    assert stream.group == (0,)
    assert stream.limit == tokens
    assert part_of(shell) == Part("a", (1,), at, is_ahead=True)
    loads = shell.controller.state.loads
    assert loads[(1,)].committed_tokens > at
    shell.token("a", tokens)
    assert stream.group == (1,)
    assert stream.tokens == tokens
    assert stream.ahead == 1
    assert part_of(shell) is None
    assert loads[(0,)].requests == {}
    shell.settle(2)
    assert shell.controller.state.splits.counts.output == 1
    assert shell.controller.state.splits.counts.undone == 0


@pytest.mark.parametrize("at", [0, 59, 60])
def test_a_request_that_one_group_computes_is_not_split(at: int) -> None:
    """At its first token, or where the first group would give the last one."""
    shell = split(at)
    assert shell.dispatched == [("a", (0,))]
    assert part_of(shell) is None


@pytest.mark.parametrize(
    "spec",
    [
        replace(ASKED, split_at=20, can_migrate=False),
        replace(ASKED, split_at=20, degree=1),
        replace(ASKED, split_at=20, prompt_splits=False),
        replace(ASKED, split_at=None),
        RequestSpec(PROMPT, PROMPT + 1, 360, split_at=99),
    ],
    ids=["it may not migrate", "one degree", "images", "not asked for", "no room at the split"],
)
def test_unsplittable_requests_run_in_one_group(spec: RequestSpec) -> None:
    """They run in one group."""
    shell = shell_of(engines=2)
    shell.arrive("a", spec)
    assert part_of(shell) is None
    assert len(shell.dispatched) == 1


def test_a_request_with_images_may_be_split_behind_its_prompt() -> None:
    shell = shell_of()
    shell.arrive("a", replace(ASKED, split_at=PROMPT, prompt_splits=False))
    assert part_of(shell) == Part("a", (1,), PROMPT, is_ahead=True)


def test_request_is_whole_without_a_second_group_or_a_migration() -> None:
    """One group, all others full, or no migration measured."""
    one = shell_of(engines=2)
    one.order(Layout.uniform(2, 2))
    one.acknowledge()
    full = shell_of(engines=2)
    for number in range(4):
        full.arrive(f"r{number}", replace(ASKED, degree=1))
        full.token(f"r{number}")
    unmeasured = shell_of()
    unmeasured.controller.state.migrates = {}
    for shell in (one, unmeasured):
        split(20, shell)
        assert part_of(shell) is None
        assert shell.open["a"].group is not None
    split(20, full)
    assert part_of(full) is None


def test_groups_of_any_size_share_a_request_that_asks_for_it() -> None:
    """A pair and an engine, two pairs."""
    shell = shell_of()
    shell.order(Layout(((0, 1), (2,), (3,))))
    shell.acknowledge()
    split(20, shell)
    part = part_of(shell)
    assert part is not None
    assert {len(part.group), len(shell.open["a"].group or ())} == {1, 2}
    pairs = shell_of()
    pairs.order(PAIRS)
    pairs.acknowledge()
    split(45, pairs)
    assert pairs.open["a"].group == (0, 1)
    assert part_of(pairs) == Part("a", (2, 3), 45, is_ahead=True)


@pytest.mark.parametrize("at", [20, 45])
def test_the_end_of_a_split_request_ends_its_part(at: int) -> None:
    """By a stop in the first group, or because its client leaves, before and after its first
    token.
    """
    for aborted in (False, True):
        for tokens in (0, 3):
            shell = split(at)
            if tokens:
                shell.token("a", tokens)
            shell.finish("a", aborted=aborted)
            assert part_of(shell) is None
            assert shell.controller.state.loads.groups == []


@pytest.mark.parametrize("at", [20, 45])
@pytest.mark.parametrize("mode", ["weave", "sequential", "migrate", "soft"])
def test_split_request_becomes_ordinary_at_an_operators_order(at: int, mode: str) -> None:
    """Whether the new layout has its groups or not; it goes on with the KV that there is."""
    for layout in (PAIRS, Layout(((0,), (1,), (2, 3)))):
        shell = split(at)
        if at > PROMPT:
            shell.token("a", 2)
        shell.order(layout, mode)
        assert part_of(shell) is None
        assert shell.controller.state.splits.counts.undone == 1
        shell.settle(4)


def test_a_policys_switch_undoes_splits_over_groups_that_it_ends() -> None:
    """The split over the two other engines stays."""
    shell = shell_of()
    split(45, shell, "a")
    split(45, shell, "b")
    groups = {part.group for part in shell.parts.values()} | {
        shell.open[name].group for name in "ab"
    }
    assert groups == {(0,), (1,), (2,), (3,)}
    layout = Layout(((0, 1), (2,), (3,)))
    decision = Decision(layout, "weave", "load: 1.00 requests/s", 1.0, 0.1)
    shell.carry_out(shell.controller.begin_switch(layout, "weave", None, shell.now_s, decision)[1])
    assert [part.request_id for part in shell.parts.values()] == ["b"]
    shell.settle(4)


def test_an_undone_split_ends_at_its_token_and_goes_on_where_there_is_room() -> None:
    """With the KV that its first group offers."""
    shell = split(45)
    shell.order(PAIRS)
    shell.acknowledge()
    shell.token("a", 6)
    stream = shell.open["a"]
    assert stream.group in PAIRS.groups
    assert stream.arrived_with_kv
    assert stream.ahead == 1
    assert stream.tokens == 6


def test_an_undone_split_goes_on_in_its_own_group_if_no_other_holds_it() -> None:
    """An operator has taken the only groups that could from the layout."""
    shell = shell_of()
    shell.order(PAIRS)
    shell.acknowledge()
    shell.arrive("a", RequestSpec(120, 150, 30, split_at=130))
    group = shell.open["a"].group
    shell.order(APART)
    shell.acknowledge()
    shell.token("a", 1000)
    assert shell.open["a"].group == group
    assert shell.open["a"].arrived_with_kv
    shell.settle(2)


@pytest.mark.parametrize("failed", [True, False])
def test_a_request_goes_on_when_its_prefix_fails(failed: bool) -> None:
    """In its second group, which may pull what there is."""
    shell = split(20)
    shell.end_prefix(1, failed=failed)
    assert shell.open["a"].group == (1,)
    assert shell.controller.state.splits.counts.undone == failed
    shell.settle(2)


def test_a_request_whose_group_has_no_room_for_the_rest_exceeds_it() -> None:
    """A second group that holds no more tokens sends it on to a wider one, as ever."""
    shell = shell_of()
    shell.order(Layout(((0,), (1,), (2, 3))))
    shell.acknowledge()
    for number in range(2):
        shell.arrive(f"w{number}", RequestSpec(10, 150, 140, split_at=None))
    shell.arrive("a", RequestSpec(40, 41, 360, split_at=60))
    first = shell.open["a"].group
    shell.token("a", 1000)
    second = shell.open["a"].group
    assert second is not None and second != first
    while len(shell.open["a"].group or (0, 1)) == 1:
        shell.token("a", 1000)
    assert shell.open["a"].arrived_with_kv


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_policy_splits_where_the_planner_predicts_a_gain(dry_run: bool) -> None:
    """Both engines are to finish at the same time."""
    shell = busy("split", dry_run=dry_run)
    counts = shell.controller.state.splits.counts
    assert (part_of(shell) is None) == dry_run
    assert (counts.prompt + counts.output == 1) != dry_run


@pytest.mark.parametrize("policy", ["auto", "static-dp", "manual"])
def test_other_policies_split_only_requests_with_split_at(policy: str) -> None:
    assert part_of(busy(policy)) is None


def test_the_policy_leaves_a_short_request_whole_to_an_idle_group() -> None:
    """A part in the other group would end later, with all that is to be done there."""
    shell = busy("split", others=1, spec=BRIEF)
    assert part_of(shell) is None
    assert shell.dispatched == [("new", (1,))]
