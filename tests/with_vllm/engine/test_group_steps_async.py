"""Groups that schedule asynchronously: a second step is planned before the output of the first is
taken.
"""

from itertools import pairwise
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from flying_serving.engine.caches import reset_prefix_caches
from flying_serving.engine.messages import RunStep
from flying_serving.scheduling.arbiter import HOLD_S, Wait
from flying_serving.vllm_adapter.keys import MIGRATED_FROM_KEY
from tests.with_vllm.engine.looping_node import LoopingNode, outputs
from tests.with_vllm.vllm_adapter.kv_lanes import make, token


def test_second_step_is_launched_before_the_first_output_is_taken() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 12), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 12)}
    assert node.engines[0].worker.most_kept == 2


def test_group_with_a_synchronous_scheduler_has_one_step_outstanding() -> None:
    node = LoopingNode(overlaps=False)
    node.add(make("a", 1, 6, 12), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 12)}
    assert node.engines[0].worker.most_kept == 0


def present() -> LoopingNode:
    """A node whose layout is the group: its leader announces that it goes on."""
    node = LoopingNode()
    for engine in node.engines:
        engine.loop.arbiter.switch(2, hard=False, weave_steps=1, now_s=node.now_s)
    return node


def test_member_keeps_as_many_outputs_as_its_leader() -> None:
    node = present()
    node.add(make("a", 1, 6, 12), 2)
    node.finish()
    leads, follows = (engine.worker for engine in node.engines)
    assert follows.launched == leads.launched
    assert follows.most_kept == 2


def test_member_notes_a_step_before_it_launches_the_step_after_the_next() -> None:
    node = present()
    node.add(make("a", 1, 6, 20), 2)
    worker = node.engines[1].worker
    noted: list[int] = []
    execute = worker.execute

    def counted(*args: Any) -> Any:
        noted.append(worker.launched - max(step for step, _ in node.board.sampled(1, 2)))
        return execute(*args)

    worker.execute = counted  # type: ignore[method-assign]
    node.finish()
    assert max(noted) == 1


def test_member_waits_for_an_announced_step_before_it_takes_an_output() -> None:
    node = present()
    node.add(make("a", 1, 6, 20), 2)
    node.run(8)
    member = node.engines[1]
    while len(member.worker.kept) != 1 or member.inbox:
        node.run(1)
    member.run()
    assert len(member.worker.kept) == 1
    retry_s = member.loop.group_steps.retry_in_s(node.now_s)
    assert retry_s is not None
    assert 0.0 < retry_s <= HOLD_S
    node.now_s += HOLD_S
    member.run()
    assert not member.worker.kept
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 20)}


def test_request_at_its_token_limit_gets_no_step_too_many() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 5), 2)
    node.finish()
    assert node.ended == {"a": "length"}
    rows = [row for row in node.engines[0].steps.take_rows() if row.sequences]
    assert len(rows) == 4  # the first token is the prompt's


def test_request_at_the_longest_length_ends_there() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 60, 40), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, 60, 4)}
    assert node.ended == {"a": "length"}


def test_token_after_a_stop_token_that_is_seen_late_is_dropped() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 30, stop_at=10), 2)
    node.add(make("b", 2, 6, 20), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 5), "b": outputs(2, 6, 20)}
    assert node.ended["a"] == "stop"


def test_aborted_request_gets_no_token_of_an_outstanding_step() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 30), 2)
    node.add(make("b", 2, 6, 20), 2)
    node.run_until_tokens("a", 4)
    node.run_until_outstanding(2)
    had = list(node.tokens["a"])
    node.engines[0].loop.abort(["a"])
    node.finish()
    assert node.tokens == {"a": had, "b": outputs(2, 6, 20)}


def test_abort_that_comes_during_a_step_drops_its_token() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 30), 2)
    node.run_until_tokens("a", 4)
    had = len(node.tokens["a"])
    node.engines[0].aborting = ["a"]
    node.finish()
    assert node.tokens["a"] == outputs(1, 6, had)


@pytest.mark.parametrize("outstanding", [1, 2])
def test_migrating_request_goes_on_with_its_kv_and_the_same_tokens(outstanding: int) -> None:
    """The tokens that outstanding steps sample are sampled again where the request goes on."""
    node = LoopingNode()
    node.add(make("a", 3, 10, 30), 2)
    node.run_until_tokens("a", 4)
    node.run_until_outstanding(outstanding)
    engine = node.engines[0]
    had = list(node.tokens["a"])
    engine.loop.migrations.retain("a", 7)
    offer = engine.table.read(7)
    assert offer is not None and offer.is_final
    assert offer.tokens == 10 + len(had) - 1
    for owner in node.engines:
        blocks = owner.loop.lanes.by_size[2].physical(list(offer.blocks))
        for place in range(offer.tokens):
            assert owner.worker.has(blocks, place) == token(3, place)

    node.add(make("b", 3, 10, 30, had=len(had)), 1, **{MIGRATED_FROM_KEY: [0, 2, 7]})
    node.finish()
    assert node.tokens["a"] == had
    assert had + node.tokens["b"] == outputs(3, 10, 30)
    assert engine.loop.migrations.incoming.counts().prefilled_again == 0


@pytest.mark.parametrize("had", [1, 5])
def test_request_that_comes_with_history_goes_on_in_the_group(had: int) -> None:
    node = LoopingNode()
    node.add(make("a", 3, 10, 12, had=had), 2)
    node.add(make("b", 2, 7, 9), 2)
    node.finish()
    assert node.tokens == {"a": outputs(3, 10, 12)[had:], "b": outputs(2, 7, 9)}


def test_request_that_is_preempted_with_a_token_outstanding_loses_none() -> None:
    node = LoopingNode(blocks=13)
    node.add(make("a", 1, 12, 28), 2)
    node.add(make("b", 2, 12, 28), 2)
    node.finish()
    assert node.tokens == {"a": outputs(1, 12, 28), "b": outputs(2, 12, 28)}
    assert node.preempted == ["b"]


def test_plan_of_nothing_waits_for_the_outstanding_output() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 2), 2)
    node.run_until_outstanding(1)
    planned = []
    schedule = node.leader.scheduler.schedule

    def counted() -> Any:
        planned.append(schedule())
        return planned[-1]

    node.leader.scheduler.schedule = counted
    node.finish()
    empty = [plan for plan in planned if not plan.total_num_scheduled_tokens]
    # one beside the last token, and the one that tells the workers of the end
    assert len(empty) == 2
    assert node.tokens == {"a": outputs(1, 6, 2)}


def test_request_with_a_grammar_is_planned_after_the_token_before() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 12), 2)
    node.run(8)
    (request,) = node.leader.scheduler.running
    node.run_until_outstanding(1)
    request.structured_output_request = object()
    assert not node.leader.ready(node.now_s)
    request.structured_output_request = None
    assert node.leader.ready(node.now_s)


def test_lanes_take_turns_as_if_each_step_were_over() -> None:
    """With a step of lane 1 to make, the group plans none ahead."""
    node = LoopingNode()
    node.engines[0].loop.arbiter.switch(2, hard=False, weave_steps=1, now_s=node.now_s)
    node.add(make("a", 1, 6, 20), 2)
    node.add(make("b", 2, 6, 20), 1)
    node.run(20)
    assert node.tokens["b"]
    before = node.engines[0].worker.most_kept
    assert before <= 1
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 20), "b": outputs(2, 6, 20)}


@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("hard", [False, True])
def test_switch_while_steps_are_outstanding_loses_no_token(outstanding: int, hard: bool) -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 20), 2)
    node.run(8)
    for engine in node.engines:
        engine.loop.arbiter.switch(2, hard=hard, weave_steps=1, now_s=node.now_s)
    node.run_until_outstanding(outstanding)
    for engine in node.engines:
        engine.loop.arbiter.switch(1, hard=hard, weave_steps=1, now_s=node.now_s)
    node.add(make("b", 2, 6, 20), 1)
    node.finish()
    assert node.tokens == {"a": outputs(1, 6, 20), "b": outputs(2, 6, 20)}


def test_reset_of_running_requests_takes_outstanding_outputs_first() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 9, 20), 2)
    node.run(8)
    node.run_until_outstanding(2)
    loop = node.engines[0].loop
    assert reset_prefix_caches(loop, reset_running_requests=True, reset_connector=False)
    assert not node.leader.outstanding
    assert [request.status for request in node.leader.scheduler.waiting] == [
        RequestStatus.PREEMPTED
    ]
    node.finish()
    assert node.tokens == {"a": outputs(1, 9, 20)}


def test_engine_takes_outputs_before_it_waits() -> None:
    """A paused group plans no step, and the token of the last one must not wait for it."""
    node = LoopingNode()
    node.add(make("a", 1, 6, 20), 2)
    node.run(8)
    node.run_until_outstanding(1)
    while not node.engines[0].loop.group_steps:
        (message,) = node.engines[0].inbox
        assert isinstance(message, RunStep)
        node.engines[0].loop.serve()
    had = len(node.tokens["a"])
    node.leader.outstanding.planned_nothing()
    assert isinstance(node.engines[0].loop._choose(), Wait)
    assert node.engines[0].loop.has_work()
    node.run(1)
    assert len(node.tokens["a"]) == had + 1
    node.finish()


def test_durations_of_overlapping_steps_do_not_overlap() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 20), 2)
    began_s = node.now_s
    node.finish()
    rows = node.engines[0].steps.take_rows()
    assert len(rows) == 20
    assert sum(row.seconds for row in rows) <= node.now_s - began_s


@pytest.mark.parametrize("stop_at", [None, 21])
def test_preemption_beside_an_outstanding_step_delivers_its_token(stop_at: int | None) -> None:
    """The outstanding step samples one more token of a request that has no blocks any more."""
    node = LoopingNode()
    node.add(make("a", 1, 12, 28, stop_at=stop_at), 2)
    node.run_until_tokens("a", 9)
    node.run_until_outstanding(1)
    scheduler = node.leader.scheduler
    request = scheduler.running.pop()
    assert request.num_output_placeholders == 1
    scheduler._preempt_request(request, 0.0)
    assert node.leader.pool.valid_tokens(request) == 0
    node.finish()
    assert node.preempted == ["a"]
    assert node.tokens["a"] == outputs(1, 12, 28 if stop_at is None else 10)


def test_arbiter_counts_the_time_of_overlapping_steps_once() -> None:
    node = LoopingNode()
    node.add(make("a", 1, 6, 20), 2)
    steps: list[tuple[float, float]] = []
    for _ in range(80):
        node.run(1)
        if not steps or node.engines[0].loop.last_step_s != steps[-1]:
            steps.append(node.engines[0].loop.last_step_s)
    assert len(steps) >= 20
    assert all(began_s >= ended_s for (_, ended_s), (began_s, _) in pairwise(steps))
