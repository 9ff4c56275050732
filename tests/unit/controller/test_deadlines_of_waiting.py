"""Controller: a request that has not begun by its deadline is refused."""

from dataclasses import replace

import pytest

from flying_serving.predict.migrations import MigrationCost
from tests.unit.controller.examples import HURRIED, SHORT, WIDE, manual
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell


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
    """Until a scheduler has the request in a step; what is dispatched later may go before it."""
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
