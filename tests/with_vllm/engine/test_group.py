"""Leader and Member: steps, and blocks that are asked for, lent, used and given back."""

from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from flying_serving.engine.group import ASK_AGAIN_S
from flying_serving.engine.messages import (
    BeginAnew,
    BlocksReserved,
    LendBlocks,
    ReclaimBlocks,
    ReserveBlocks,
    ReturnBlocks,
)
from flying_serving.errors import IntegrityError
from tests.with_vllm.engine.pairs import GROUP, Pair
from tests.with_vllm.engine.schedulers import BLOCK

# ---- a step


def test_a_step_goes_to_all_members_and_its_output_to_the_scheduler() -> None:
    """One at a time: the leader is not ready for another before the first is done."""
    pair = Pair()
    assert not pair.leader.ready(0.0)
    pair.lend(2)
    assert pair.leader.ready(0.0)
    assert pair.leader.plan_step(0.0) is None
    assert not pair.leader.ready(1e9)
    assert pair.leader.retry_in_s(0.0) is None
    assert pair.kinds(0) == pair.kinds(1) == ["RunStep"]
    message: Any = pair.inboxes.of_engine[1][0]
    assert message.more
    assert message.grammar is None
    plans = [pair.serve(engine, 0.0) for engine in GROUP]
    for plan, member in zip(plans, pair.members, strict=True):
        assert plan.scheduled_new_reqs[0].block_ids == (member.lent.translate([1, 2]),)
    assert pair.leader.finish(message.plan, "output") == {0: ("outputs of", ["first"])}
    assert pair.scheduler.outputs == ["output"]
    assert pair.scheduler.done == ["first"]


def test_a_step_carries_its_own_grammar_bitmask() -> None:
    """Another lane's scheduler may fill vLLM's buffer anew before the members have served the
    message.
    """
    pair = Pair()
    pair.lend(2)
    pair.scheduler.constrained = {"first"}
    pair.scheduler.bitmask[:] = 5
    pair.leader.plan_step(0.0)
    pair.scheduler.bitmask[:] = 7
    message: Any = pair.inboxes.of_engine[1][0]
    assert message.grammar.structured_output_request_ids == ["first"]
    assert message.grammar.grammar_bitmask.tolist() == [[5, 5]]


def test_workers_are_told_of_finished_requests_in_a_last_empty_step() -> None:
    """In a step without tokens, which is the last."""
    pair = Pair()
    pair.lend(2)
    pair.leader.plan_step(0.0)
    message: Any = pair.inboxes.of_engine[0][0]
    for engine in GROUP:
        pair.serve(engine, 0.0)
    pair.leader.finish(message.plan, "output")
    assert pair.leader.ready(0.0)
    assert pair.leader.plan_step(0.0) is None
    last: Any = pair.inboxes.of_engine[0][0]
    assert last.plan.finished_req_ids == {"first"}
    assert last.plan.total_num_scheduled_tokens == 0
    assert last.more is False
    pair.leader.finish(last.plan, "nothing")
    assert not pair.leader.ready(0.0)


# ---- lending


def test_a_round_of_lending_asks_reserves_and_lends() -> None:
    """Every member is asked, the leader waits for all answers, and all lend the least that one has
    reserved.
    """
    pair = Pair()
    pair.own[1].add("local", 4 * BLOCK, 8)
    pair.own[1].schedule()
    pair.own[1].add("waits", 3, 1)
    needs = 3  # for the rest of its prompt, and for its next token
    free = pair.pools[1].free_count() - needs
    pair.scheduler.add("r", 12 * BLOCK - 1, 1)
    assert pair.leader.plan_step(0.0) is None
    assert pair.kinds(0) == pair.kinds(1) == ["ReserveBlocks"]
    assert pair.inboxes.of_engine[0][0] == ReserveBlocks(GROUP, 12, needed=12)
    assert not pair.leader.ready(1.0)
    assert pair.leader.retry_in_s(1.0) is None
    pair.serve(0, 0.0)
    assert pair.inboxes.of_engine[0][0] == BlocksReserved(GROUP, 0, 12)
    pair.serve(0, 0.0)
    assert pair.kinds(0) == []  # one answer is not enough
    pair.serve(1, 0.0)
    assert pair.inboxes.of_engine[0][0] == BlocksReserved(GROUP, 1, free)
    pair.serve(0, 0.0)
    assert pair.inboxes.of_engine[0][0] == LendBlocks(GROUP, list(range(1, free + 1)))
    assert pair.leader.pool.free_count() == free
    pair.serve_all(0.0)
    assert [member.lent.lent_count for member in pair.members] == [free, free]
    shown = [dict(enumerate(part.table.physical(2, range(13)))) for part in pair.parts]
    assert [{0: 0} | {block: own for block, own in each.items() if own} for each in shown] == [
        member.lent.table for member in pair.members
    ]
    assert [pool.free_count() for pool in pair.pools] == [12 - free, needs]
    pair.leader.check()


def test_blocks_reserved_ahead_leave_the_blocks_of_local_requests() -> None:
    """Blocks until the end of what runs there and waits there."""
    pair = Pair()
    pair.lend(2)
    pair.leader.plan_step(0.0)
    pair.own[1].add("local", BLOCK, 5 * BLOCK)
    pair.own[1].schedule()
    pair.scheduler.add("second", 12 * BLOCK, 1)
    pair.leader.outstanding.clear()
    pair.leader.plan_step(0.0)
    assert pair.kinds(1) == ["RunStep", "ReserveBlocks", "RunStep"]
    ask: Any = pair.inboxes.of_engine[1][1]
    assert ask.needed == 0
    assert pair.members[1].reserve(ask) == ask.count - 4
    answer: Any = pair.inboxes.of_engine[0][-1]
    free = 12 - 2 - 1
    assert answer.count == free - 5
    assert len(pair.members[1].lent.reserved) == answer.count


def test_a_waiting_local_request_takes_no_block_of_a_groups_running_one() -> None:
    """Else that one would be preempted, and begin again."""
    pair = Pair(lend_blocks=1)
    pair.scheduler.add("r", 8 * BLOCK - 1, 9)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    pair.own[1].add("waits", 5 * BLOCK, 1)
    for _ in range(6):  # four chunks, and two tokens: one more than its eight blocks hold
        while pair.kinds(0)[:1] != ["RunStep"]:
            assert pair.leader.plan_step(0.0) is None
            pair.serve_all(0.0)
        pair.finish_step()
    assert [request.request_id for request in pair.scheduler.running] == ["r"]
    assert [member.lent.lent_count for member in pair.members] == [9, 9]


def test_a_running_prompt_keeps_the_blocks_of_its_next_chunks() -> None:
    """What a member wants back for a request that waits comes when this one has ended."""
    pair = Pair(lend_blocks=12)
    pair.scheduler.add("r", 6 * BLOCK, 1)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    pair.leader.plan_step(0.0)
    (request,) = pair.scheduler.running
    holds = len(request.blocks)
    assert holds < 6, "this is to be one chunk of several"
    pair.leader.give_back(99)
    assert pair.leader.borrowed.free_count() == 7 - holds
    pair.scheduler.end("r")
    pair.leader.give_back(99)
    assert pair.leader.borrowed.free_count() == 0


def test_short_request_steps_while_a_long_one_waits_for_blocks() -> None:
    """Blocks for a long request are asked for, and a short one is stepped meanwhile; the round goes
    on beside it.
    """
    pair = Pair()
    pair.lend(2)
    pair.scheduler.end("first")
    pair.scheduler.add("short", BLOCK - 1, 3)
    pair.scheduler.add("long", 9 * BLOCK, 1)
    assert pair.leader.plan_step(0.0) is None
    assert pair.kinds(0) == pair.kinds(1) == ["ReserveBlocks", "RunStep"]
    message: Any = pair.inboxes.of_engine[0][1]
    assert list(message.plan.num_scheduled_tokens) == ["short"]
    for engine in GROUP:
        pair.serve(engine, 0.0)
        pair.serve(engine, 0.0)
    pair.leader.finish(message.plan, "output")
    assert pair.leader._answers == {}  # the members' answers are behind the step
    assert pair.leader.ready(0.0)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    assert pair.kinds(0) == pair.kinds(1) == ["RunStep", "LendBlocks"]
    for engine in GROUP:
        pair.serve(engine, 0.0)
    pair.serve_all(0.0)
    assert [member.lent.lent_count for member in pair.members] == [11, 11]


def test_a_step_waits_for_blocks_rather_than_preempt() -> None:
    """A running request needs one more, and the members have some."""
    pair = Pair(lend_blocks=1)
    pair.scheduler.add("r", 2 * BLOCK - 1, 9)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    pair.leader.plan_step(0.0)
    pair.finish_step()
    # one token ahead: the answers may well be there before the block is needed
    pair.leader.plan_step(0.0)
    assert pair.kinds(0) == pair.kinds(1) == ["ReserveBlocks", "RunStep"]
    asked = [inbox.popleft() for inbox in pair.inboxes.of_engine]
    pair.finish_step()
    (request,) = pair.scheduler.running
    assert request.num_tokens == 2 * BLOCK + 1
    assert len(request.blocks) == 2
    assert pair.leader.borrowed.free_count() == 0
    # but they are not
    assert pair.leader.plan_step(0.0) is None
    assert pair.kinds(0) == pair.kinds(1) == []
    for inbox, message in zip(pair.inboxes.of_engine, asked, strict=True):
        inbox.append(message)
    assert not pair.leader.ready(1e9)
    assert pair.leader.retry_in_s(1e9) is None
    pair.serve_all(0.0)
    assert pair.leader.ready(0.0)
    pair.leader.plan_step(0.0)
    assert pair.scheduler.running == [request]
    assert len(request.blocks) == 3


def test_leader_asks_for_at_least_lend_blocks_and_at_most_all() -> None:
    """So that a group does not ask for every block by itself."""
    pair = Pair(lend_blocks=5)
    pair.scheduler.add("r", BLOCK - 1, 1)
    pair.leader.plan_step(0.0)
    assert pair.inboxes.of_engine[0][0] == ReserveBlocks(GROUP, 5, needed=1)
    narrow = Pair(lend_blocks=500)
    narrow.scheduler.add("r", BLOCK - 1, 1)
    narrow.leader.plan_step(0.0)
    assert narrow.inboxes.of_engine[0][0] == ReserveBlocks(GROUP, 12, needed=1)


def test_leader_asks_for_no_blocks_if_enough_or_none_are_left() -> None:
    """The step is planned at once."""
    pair = Pair(blocks=13)
    pair.lend(12)
    assert pair.leader.borrowed.room() == 0
    pair.scheduler.add("more", 4 * BLOCK, 1)
    pair.leader.plan_step(0.0)
    assert pair.kinds(0) == ["RunStep"]


def test_leader_for_whom_none_is_reserved_goes_on_and_asks_again_later() -> None:
    """Neither at once, over and over, nor never."""
    pair = Pair()
    pair.own[1].add("local", 12 * BLOCK, 1)
    pair.own[1].schedule()
    pair.scheduler.add("r", BLOCK, 1)
    now = 5.0
    pair.leader.plan_step(now)
    pair.serve_all(now)
    assert [member.lent.lent_count for member in pair.members] == [0, 0]
    # which its prompt has yet to fill
    assert [pool.free_count() for pool in pair.pools] == [
        12,
        10,
    ]
    assert pair.leader.ready(now)
    # nothing can run: outputs without a step, and a pause
    assert pair.leader.plan_step(now) == {0: ("outputs of", [])}
    assert pair.scheduler.outputs == [EMPTY_MODEL_RUNNER_OUTPUT]
    assert pair.kinds(0) == pair.kinds(1) == []
    assert not pair.leader.ready(now + ASK_AGAIN_S / 2)
    assert pair.leader.retry_in_s(now + ASK_AGAIN_S / 4) == pytest.approx(ASK_AGAIN_S * 3 / 4)
    assert pair.leader.retry_in_s(now + 1) == 0.0
    # meanwhile the local request ends
    pair.own[1].end("local")
    assert pair.leader.ready(now + ASK_AGAIN_S)
    pair.leader.plan_step(now + ASK_AGAIN_S)
    pair.serve_all(now + ASK_AGAIN_S)
    assert [member.lent.lent_count for member in pair.members] == [2, 2]
    pair.leader.plan_step(now + ASK_AGAIN_S)
    assert pair.kinds(0) == ["RunStep"]


def test_blocks_are_reclaimed_and_returned() -> None:
    """A member asks for no more than it lent, and not over and over; it gets what is not in use."""
    pair = Pair()
    pair.lend(4)
    pair.leader.plan_step(0.0)
    member = pair.members[1]
    member.reclaim(3, 10.0)
    member.reclaim(3, 10.0 + ASK_AGAIN_S / 2)
    assert pair.kinds(0) == ["RunStep", "ReclaimBlocks"]
    member.reclaim(99, 10.0 + 2 * ASK_AGAIN_S)
    assert pair.inboxes.of_engine[0][2] == ReclaimBlocks(GROUP, 1, 4)
    pair.leader.give_back(99)  # all are in use
    assert pair.kinds(1) == ["RunStep"]
    pair.scheduler.end("first")
    pair.leader.give_back(3)
    returned: Any = pair.inboxes.of_engine[1][-1]
    assert isinstance(returned, ReturnBlocks)
    assert len(returned.blocks) == 3
    for engine in GROUP:
        while pair.kinds(engine) and pair.kinds(engine)[0] != "ReturnBlocks":
            pair.inboxes.read(engine)
        pair.serve(engine, 11.0)
    assert [m.lent.lent_count for m in pair.members] == [1, 1]
    assert [pool.free_count() for pool in pair.pools] == [11, 11]
    pair.leader.check()


def test_member_without_lent_blocks_reclaims_none() -> None:
    """Its leader is left alone."""
    pair = Pair()
    pair.members[1].reclaim(3, 10.0)
    assert pair.kinds(0) == []


def test_a_leaders_check_covers_its_pool() -> None:
    """A block that the pool gives away though no member lent it is noticed."""
    pair = Pair()
    pair.lend(2)
    pair.leader.check()
    stolen = pair.leader.borrowed._withheld[0]
    pair.leader.pool.give([stolen])
    with pytest.raises(IntegrityError):
        pair.leader.check()


# ---- members that have sampled different tokens


def failing() -> tuple[Pair, Any]:
    """A step of two requests, which ends with an error. Returns the outputs, too."""
    pair = Pair()
    pair.lend(4)
    pair.leader.plan_step(0.0)
    pair.scheduler.add("waits", 40 * BLOCK, 1)
    message: Any = pair.inboxes.of_engine[0][0]
    for engine in GROUP:
        pair.serve(engine, 0.0)
    return pair, pair.leader.fail(message.plan, "output", "in words")


def test_a_failed_step_ends_all_requests_of_the_group_with_the_error() -> None:
    pair, outputs = failing()
    ends = [(end.request_id, end.finish_reason, end.stop_reason) for end in outputs[0].outputs]
    assert ends == [
        ("first", FinishReason.ERROR, "in words"),
        ("waits", FinishReason.ERROR, "in words"),
    ]
    assert not any(end.new_token_ids for end in outputs[0].outputs)
    assert pair.scheduler.requests == {}
    pair.leader.check()


def test_blocks_are_zeroed_in_a_step_without_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose KV has come may have to wait for its step."""
    pair = Pair()
    pair.lend(2)
    plan = SchedulerOutput.make_empty()
    plan.new_block_ids_to_zero = [2]
    monkeypatch.setattr(pair.scheduler, "schedule", lambda: plan)
    assert pair.leader.plan_step(0.0) is None
    message: Any = pair.inboxes.of_engine[1][0]
    assert message.plan.new_block_ids_to_zero == [2]


def test_members_begin_anew_after_a_failed_step() -> None:
    pair, _ = failing()
    for engine in GROUP:
        assert pair.inboxes.of_engine[engine].popleft() == BeginAnew(GROUP, 1)
    pair.leader.plan_step(1.0)
    message: Any = pair.inboxes.of_engine[1][0]
    assert message.plan.finished_req_ids == {"first", "waits"}


def test_a_failed_step_forgets_prefixes_also_of_blocks_in_use() -> None:
    pair = Pair()
    pair.lend(2)
    pool = pair.scheduler.pool
    pair.leader.plan_step(0.0)
    cached: Any = make_block_hash_with_group_id(BlockHash(b"prefix"), 0)
    (used,) = pair.scheduler.requests["first"].blocks[:1]
    pool.blocks[used].set_block_hash(cached)
    pool.cached_block_hash_to_block.insert(cached, pool.blocks[used])
    pool.touch([pool.blocks[used]])  # as KV on its way to another request would
    message: Any = pair.inboxes.of_engine[0][0]
    pair.leader.fail(message.plan, "output", "in words")
    assert pool.blocks[used].ref_cnt == 1
    assert pool.blocks[used].block_hash is None
