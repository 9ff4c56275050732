"""Groups that schedule asynchronously, whose members sample apart or are lost while two steps are
outstanding.
"""

from typing import Any

import pytest

from flying_serving.engine.messages import BeginAnew
from flying_serving.errors import CollectiveTimeout, EngineLost
from tests.with_vllm.engine.looping_node import LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make

WHY = "engine 1 has sampled other tokens than engine 0, which leads group [0, 1], by step {}"


# ---- members that sample apart


def apart(outstanding: int) -> tuple[LoopingNode, int]:
    """Two requests run in a group whose member samples other tokens from now on.

    Returns the number of the first step of which it does, too.
    """
    node = LoopingNode()
    node.add(make("a", 1, 4, 30), 2)
    node.add(make("b", 2, 4, 30), 2)
    node.run_until_tokens("b", 4)
    node.run_until_outstanding(outstanding)
    member = node.engines[1].worker
    member.token_offset = 1
    return node, member.launched + 1


@pytest.mark.parametrize("outstanding", [1, 2])
def test_member_apart_ends_all_requests_with_an_error_that_names_it(outstanding: int) -> None:
    node, step = apart(outstanding)
    node.finish()
    assert node.ended == {"a": "error", "b": "error"}
    why = WHY.format(step)
    assert {name: why_.startswith(why) for name, why_ in node.errors.items()} == {
        "a": True,
        "b": True,
    }


@pytest.mark.parametrize("outstanding", [1, 2])
def test_no_token_is_given_out_that_follows_the_other_token(outstanding: int) -> None:
    node, step = apart(outstanding)
    node.finish()
    # Each step gives it a token, from the first one on. That of the step is the leader's. It is not
    # given out if the member's was noted by then.
    assert node.tokens["a"] in (outputs(1, 4, step - 1), outputs(1, 4, step))
    assert node.tokens["b"] == outputs(2, 4, len(node.tokens["b"]))


@pytest.mark.parametrize("outstanding", [1, 2])
def test_members_begin_anew_once_and_later_requests_are_served(outstanding: int) -> None:
    node, _ = apart(outstanding)
    while not node.errors:
        node.run(1)
    # a step of the ended requests is outstanding still
    assert node.leader.outstanding.count == 1
    assert node.engines[0].loop.group_steps._ending == {2}
    node.add(make("c", 1, 4, 12), 2)
    node.finish()
    assert node.tokens["c"] == outputs(1, 4, 12)
    assert node.ended["c"] == "length"
    assert [engine.worker.begun_anew for engine in node.engines] == [[1], [1]]
    assert not any(engine.loop.group_steps._ending for engine in node.engines)


def test_request_before_the_members_begin_anew_is_planned_at_once() -> None:
    node, _ = apart(2)
    while not node.errors:
        node.run(1)
    (message,) = (m for m in node.engines[0].inbox if isinstance(m, BeginAnew))
    assert message.times == 1
    node.add(make("c", 1, 4, 12), 2)
    node.leader.plan_step(node.now_s)
    assert node.leader.outstanding.count == 2
    node.finish()
    assert node.tokens["c"] == outputs(1, 4, 12)


def test_members_that_are_apart_again_begin_anew_again() -> None:
    node, _ = apart(2)
    node.finish()
    node.add(make("c", 1, 4, 30), 2)
    node.run_until_tokens("c", 4)
    node.engines[1].worker.token_offset = 2
    node.finish()
    assert node.ended["c"] == "error"
    assert [engine.worker.begun_anew for engine in node.engines] == [[1, 2], [1, 2]]


def test_members_apart_in_a_synchronous_group_end_its_requests() -> None:
    node = LoopingNode(overlaps=False)
    node.add(make("a", 1, 4, 30), 2)
    node.run_until_tokens("a", 4)
    member = node.engines[1].worker
    member.token_offset, step = 1, member.launched + 1
    node.finish()
    assert node.errors["a"].startswith(WHY.format(step))
    assert node.tokens == {"a": outputs(1, 4, step)}


# ---- members whose notes come late


def without_notes() -> tuple[LoopingNode, list[Any]]:
    """A group of which the member's notes do not come any more, and what it has noted since."""
    node = LoopingNode()
    node.add(make("a", 1, 6, 30), 2)
    node.run_until_tokens("a", 4)
    notes: list[Any] = []
    note = node.board.note_sampled

    def hold_back(engine: int, *args: Any) -> None:
        if engine == 1:
            notes.append((engine, *args))
        else:
            note(engine, *args)

    node.board.note_sampled = hold_back  # type: ignore[method-assign]
    return node, notes


def test_output_waits_for_the_notes_of_the_step_before() -> None:
    node, notes = without_notes()
    node.run(40)
    had = list(node.tokens["a"])
    last_noted, _ = max(node.board.sampled(1, 2))
    assert had == outputs(1, 6, last_noted + 1)
    assert node.leader.outstanding.count == 2
    assert node.engines[0].loop.group_steps.waits_for_notes()
    del node.board.note_sampled  # type: ignore[method-assign]
    for args in notes:
        node.board.note_sampled(*args)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 30)}


def test_other_lane_steps_while_an_output_waits_for_notes() -> None:
    node, notes = without_notes()
    node.run(40)
    node.add(make("b", 2, 6, 10), 1)
    node.run(80)
    assert node.tokens["b"] == outputs(2, 6, 10)
    del node.board.note_sampled  # type: ignore[method-assign]
    for args in notes:
        node.board.note_sampled(*args)
    node.finish()
    assert node.tokens["a"] == outputs(1, 6, 30)


def test_notes_that_never_come_are_an_error_that_names_the_member() -> None:
    node, _ = without_notes()
    node.run(40)
    with pytest.raises(CollectiveTimeout, match=r"^group \[0, 1\]: waited .* tokens of engine 1$"):
        for _ in range(70):
            node.now_s += 1.0
            node.run(1)


def test_a_machine_that_was_stopped_is_no_member_that_does_not_note() -> None:
    """Clocks have gone on."""
    node, notes = without_notes()
    node.run(40)
    node.now_s += 1000.0
    node.run(2)
    del node.board.note_sampled  # type: ignore[method-assign]
    for args in notes:
        node.board.note_sampled(*args)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 30)}


# ---- members that are lost


def test_lost_member_ends_an_engine_that_does_not_survive_it() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 30), 2)
    node.run(4)
    node.engines[0].loop.membership = None
    node.engines[0].worker.loses_member = True
    with pytest.raises(EngineLost, match="engine 1 is lost"):
        node.run(10)


@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("notices", [False, True], ids=["told", "noticed and told"])
def test_lost_member_takes_the_group_with_its_outstanding_steps(
    outstanding: int, notices: bool
) -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 30), 2)
    node.run_until_tokens("a", 3)
    node.run_until_outstanding(outstanding)
    leads = node.engines[0]
    if notices:
        leads.worker.loses_member = True
        for _ in range(20):
            leads.run()
        assert leads.loop.lanes.broken == {2}
    node.lose_member()
    assert not node.leader.outstanding
    assert not leads.loop.group_steps
    assert not leads.worker.kept
    assert not leads.loop.has_work()

    # lane 1 goes on, and the group does when its member is there again
    node.add(make("b", 2, 6, 8), 1)
    for _ in range(40):
        leads.run()
    assert node.tokens["b"] == outputs(2, 6, 8)
    node.start_member()
    node.add(make("c", 3, 6, 12), 2)
    node.finish()
    assert node.tokens["c"] == outputs(3, 6, 12)


def test_lost_member_whose_notes_are_awaited_takes_the_group_with_it() -> None:
    node, _ = without_notes()
    node.run(40)
    assert node.engines[0].loop.group_steps.waits_for_notes()
    node.lose_member()
    assert not node.engines[0].loop.group_steps
    assert not node.engines[0].loop.has_work()


def test_group_that_is_lost_before_it_begins_anew_starts_afresh() -> None:
    node, _ = apart(2)
    while not node.errors:
        node.run(1)
    node.lose_member()
    node.start_member()
    node.add(make("c", 1, 4, 12), 2)
    node.finish()
    assert node.tokens["c"] == outputs(1, 4, 12)
    assert node.ended["c"] == "length"


@pytest.mark.parametrize("overlaps", [True, False])
def test_steps_after_a_loss_are_timed_again(overlaps: bool) -> None:
    """The output of a step that was planned before the loss never comes."""
    node = LoopingNode(overlaps=overlaps)
    node.add(make("a", 1, 6, 30), 2)
    node.run_until_tokens("a", 3)
    node.run_until_outstanding(1)
    node.lose_member()
    node.start_member()
    steps = node.engines[0].steps
    steps.take_rows()
    node.add(make("c", 3, 6, 12), 2)
    node.finish()
    assert len(steps.take_rows()) == 12
