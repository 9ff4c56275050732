"""Requests whose lengths turn out otherwise than planned: they stay, move, or keep their group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flying_serving.controller import splitter
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.splits import SplitCounts
from flying_serving.policy.split import MOST_PROBES, Plan
from flying_serving.predict.demand import MARGIN_TOKENS
from tests.unit.controller.examples import roomy
from tests.unit.controller.model_shell import ModelShell

PROMPT, EXPECTED, MOST = 100, 20, 400
HINTED = RequestSpec(PROMPT, PROMPT + 1, MOST, expected_tokens=EXPECTED, most_tokens=PROMPT + MOST)
UNKNOWN = replace(HINTED, expected_tokens=None)
PLANNED = EXPECTED + MARGIN_TOKENS
WHOLE = PROMPT + MOST
"""A split here leaves all of a request to its first group."""
A, B = (0,), (1,)


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every request to its first group at its arrival, by three probes."""
    monkeypatch.setattr(splitter, "plan", lambda *_: Plan(WHOLE, 1.0, 1.0, 3))


def serving(spec: RequestSpec = HINTED, policy: str = "split") -> ModelShell:
    """Return a server on whose two engines four requests decode, none of them split."""
    shell = roomy(policy)
    for number in range(4):
        shell.arrive(f"r{number}", spec)
        shell.token(f"r{number}")
    assert not shell.parts
    assert len(of(shell, A)) == len(of(shell, B)) == 2
    return shell


def of(shell: ModelShell, group: tuple[int, ...]) -> list[str]:
    """Return the requests of a group."""
    return [name for name, stream in shell.open.items() if stream.group == group]


def counts(shell: ModelShell) -> SplitCounts:
    """Return the server's counts of splits."""
    return shell.controller.state.splits.counts


def state_of(shell: ModelShell, name: str) -> RequestState:
    """Return what the controller knows of a request that runs."""
    return shell.controller.state.started[name]


def longer(shell: ModelShell, name: str) -> None:
    """A request gets one token more than it was planned for, and time passes."""
    shell.token(name, PLANNED + 1 - shell.open[name].tokens)
    shell.tick()


def learned(shell: ModelShell, outputs: int = MOST) -> None:
    """The server learns that outputs are so long."""
    demand = shell.controller.state.demand
    for _ in range(50):
        demand.arrived(PROMPT, MOST, shell.now_s)
        demand.grew(0, outputs)
        demand.finished(outputs)


# ---- requests that have more tokens than planned


def test_a_longer_request_moves_to_a_group_that_has_less_to_do() -> None:
    """With its KV, and the tokens that it has."""
    shell = serving()
    shell.finish(*of(shell, B))
    name = of(shell, A)[0]
    longer(shell, name)
    stream = shell.open[name]
    assert stream.group == B
    assert stream.arrived_with_kv
    assert stream.tokens == PLANNED + 1
    assert (counts(shell).replanned, counts(shell).moved) == (1, 1)
    shell.settle(4)


def test_a_longer_request_stays_where_moving_gains_nothing() -> None:
    """Its group's books have its new length."""
    shell = serving()
    name = of(shell, A)[0]
    before = state_of(shell, name).committed_tokens
    longer(shell, name)
    assert shell.open[name].group == A
    assert (counts(shell).replanned, counts(shell).moved) == (1, 0)
    state = state_of(shell, name)
    assert state.plan is not None
    assert state.committed_tokens == PROMPT + state.plan.output_tokens
    assert state.committed_tokens > max(before, state.context_tokens)


@pytest.mark.parametrize("tokens", [PLANNED - 1, PLANNED])
def test_a_request_that_is_no_longer_than_planned_stays(tokens: int) -> None:
    shell = serving()
    shell.finish(*of(shell, B))
    name = of(shell, A)[0]
    shell.token(name, tokens - 1)
    shell.tick()
    assert shell.open[name].tokens == tokens
    assert shell.open[name].group == A
    assert counts(shell).replanned == 0


def test_a_request_is_planned_again_once_within_the_probes_of_a_plan() -> None:
    shell = serving()
    name = of(shell, A)[0]
    longer(shell, name)
    shell.finish(*of(shell, B))
    shell.token(name, 200)
    shell.tick()
    assert shell.open[name].group == A
    assert counts(shell).replanned == 1
    made = state_of(shell, name).plan
    assert made is not None
    assert made.is_revised and made.probes <= MOST_PROBES


def test_a_plan_that_has_taken_all_probes_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request goes on where it is."""
    monkeypatch.setattr(splitter, "plan", lambda *_: Plan(WHOLE, 1.0, 1.0, MOST_PROBES - 1))
    shell = serving()
    shell.finish(*of(shell, B))
    name = of(shell, A)[0]
    longer(shell, name)
    assert shell.open[name].group == A
    assert counts(shell).replanned == 0


def test_a_tick_plans_a_bounded_number_of_requests_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are planned at the next."""
    monkeypatch.setattr(splitter, "MOST_AT_ONCE", 1)
    shell = serving()
    for name in of(shell, A):
        shell.token(name, PLANNED)
    for made in (1, 2, 2):
        shell.tick()
        assert counts(shell).replanned == made


@pytest.mark.parametrize("policy", ["static-dp", "manual"])
def test_no_other_policy_moves_longer_requests(policy: str) -> None:
    shell = serving(policy=policy)
    shell.finish(*of(shell, B))
    name = of(shell, A)[0]
    longer(shell, name)
    assert shell.open[name].group == A
    assert counts(shell).replanned == 0


# ---- splits that are ahead


def split_at(at: int, monkeypatch: pytest.MonkeyPatch, *, balanced: bool) -> ModelShell:
    """Return a server that has split a request where its length was not known.

    Its first group has no other requests unless both are `balanced`.
    """
    shell = serving(UNKNOWN)
    if not balanced:
        shell.finish(*of(shell, A))
    monkeypatch.setattr(splitter, "plan", lambda *_: Plan(at, 1.0, 2.0, 3))
    shell.arrive("new", UNKNOWN)
    assert len(shell.parts) == 1
    return shell


def test_a_split_is_undone_if_the_first_group_should_keep_a_longer_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes on behind the split, with its KV."""
    shell = split_at(PROMPT + 10, monkeypatch, balanced=False)
    shell.token("new")
    learned(shell)
    shell.tick()
    assert not shell.parts
    assert (counts(shell).replanned, counts(shell).undone) == (1, 1)
    shell.token("new", MOST)
    assert shell.open["new"].tokens == 11
    assert shell.open["new"].group is not None
    assert shell.open["new"].arrived_with_kv
    shell.settle(6)


def test_a_split_stays_if_the_second_group_should_have_a_longer_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is handed over as planned."""
    shell = split_at(PROMPT + 10, monkeypatch, balanced=True)
    shell.token("new")
    (part,) = shell.parts.values()
    learned(shell)
    shell.tick()
    assert (counts(shell).replanned, counts(shell).undone) == (1, 0)
    shell.token("new", MOST)
    assert shell.open["new"].group == part.group
    assert not shell.parts


@pytest.mark.parametrize(
    ("at", "tokens", "outputs"),
    [(PROMPT + 10, 1, None), (PROMPT - 50, 0, MOST), (PROMPT + 10, 0, MOST)],
    ids=["about as long", "inside the prompt", "not begun"],
)
def test_splits_that_are_not_planned_again(
    at: int, tokens: int, outputs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = split_at(at, monkeypatch, balanced=False)
    if tokens:
        shell.token("new", tokens)
    made = state_of(shell, "new").plan
    assert made is not None
    learned(shell, outputs or made.output_tokens - MARGIN_TOKENS)
    shell.tick()
    assert len(shell.parts) == 1
    assert counts(shell).replanned == 0
    shell.settle(6)


def test_lengths_that_clients_announce_do_not_change_a_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What others get says nothing of a length that is known."""
    shell = serving()
    monkeypatch.setattr(splitter, "plan", lambda *_: Plan(PROMPT + 10, 1.0, 2.0, 3))
    shell.arrive("new", HINTED)
    shell.token("new")
    learned(shell)
    shell.tick()
    assert len(shell.parts) == 1
    assert counts(shell).replanned == 0
