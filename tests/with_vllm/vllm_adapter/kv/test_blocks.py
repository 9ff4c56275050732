"""SchedulerPool over vLLM's own BlockPool: what is counted, in which order blocks go, and what the
check notices.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flying_serving.errors import IntegrityError
from flying_serving.vllm_adapter.kv.blocks import may_start
from tests.with_vllm.memory.pools import VllmPool


def request(
    prompt: int, max_tokens: int, computed: int = 0, output: int = 0, outstanding: int = 0
) -> Any:
    """Return what the pool asks of a vLLM request."""
    return SimpleNamespace(
        request_id=f"{prompt}-{max_tokens}-{computed}-{output}",
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        num_computed_tokens=computed,
        num_tokens=prompt + output,
        num_tokens_with_spec=prompt + output,
        spec_token_ids=[],
        num_output_placeholders=outstanding,
    )


def pool_with(running: list[tuple[Any, int]], waiting: list[Any], blocks: int = 21) -> VllmPool:
    """Return a pool whose scheduler has running requests, each with so many blocks of four tokens,
    and waiting ones.
    """
    pool = VllmPool(blocks)
    scheduler: Any = pool.scheduler
    scheduler.block_size, scheduler.max_model_len, scheduler.max_num_scheduled_tokens = 4, 64, 8
    scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting = (
        [one for one, _ in running],
        waiting,
        [],
    )
    for one, count in running:
        scheduler.owned[one.request_id] = pool.take(count)
    scheduler.requests = {one.request_id: one for one in [*scheduler.running, *waiting]}
    return pool


def test_take_evicts_the_least_recently_used_and_give_returns() -> None:
    """What was cached and given back first is taken first; what was never cached goes before."""
    pool = VllmPool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    for block in (1, 2, 3):
        pool.remember(block, b"%d" % block)
    for block in (2, 3, 1, 4):
        pool.give([block])
    assert [pool.remembers(b"%d" % block) for block in (1, 2, 3)] == [1, 2, 3]
    assert pool.take(2) == [4, 2]
    assert [pool.remembers(b"%d" % block) for block in (1, 2, 3)] == [1, None, 3]
    assert pool.free_count() == 2


def test_check_accepts_books_that_balance() -> None:
    """Free, owned and outside are all blocks, the null block left out."""
    pool = pool_with([(request(8, 4), 3)], [])
    outside = set(pool.take(5))
    pool.check(outside)
    assert pool.requests_own() == {1, 2, 3}
    pool.scheduler.owned["8-4-0-0"] = [0, 1, 2, 3]  # a request may have the null block in its table
    pool.check(outside)


@pytest.mark.parametrize(
    ("spoil", "lent", "message"),
    [
        pytest.param(
            lambda pool: pool.take(1), set(), r"blocks without owner: \[4\]", id="forgotten"
        ),
        pytest.param(
            lambda pool: pool.scheduler.owned["8-4-0-0"].append(9),
            set(),
            r"two owners: \[9\]",
            id="owned-and-free",
        ),
        pytest.param(lambda pool: None, {2}, r"blocks with two owners: \[2\]", id="owned-and-lent"),
        pytest.param(lambda pool: None, {9}, r"blocks with two owners: \[9\]", id="lent-and-free"),
        pytest.param(
            lambda pool: pool._pool.free_block_queue.popleft(),
            set(),
            "17 blocks without reference, 16 in the free list",
            id="lost-from-the-free-list",
        ),
    ],
)
def test_check_notices(spoil: Callable[[VllmPool], object], lent: set[int], message: str) -> None:
    """Each way in which books can fail to balance, with the blocks in question."""
    pool = pool_with([(request(8, 4), 3)], [])
    pool.check(set())
    spoil(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check(lent)


def test_blocks_are_reserved_until_the_end_of_requests() -> None:
    """Prompt and max_tokens, at most the model's length, less what is there; for waiting requests
    too.
    """
    assert pool_with([], []).reserved() == 0
    assert pool_with([(request(8, 4), 2)], []).reserved() == 1
    assert pool_with([(request(8, 5), 2)], []).reserved() == 2
    assert pool_with([(request(8, 4000), 2)], []).reserved() == 14
    assert pool_with([(request(8, 4), 3)], [request(5, 1)]).reserved() == 2


def test_blocks_missing_for_the_next_step() -> None:
    """A prompt must fit as a whole; everything is asked for one token ahead of what the step
    writes.
    """
    assert pool_with([], []).missing_for_next() == 0
    assert pool_with([], [request(8, 4)], blocks=3).missing_for_next() == 1
    assert pool_with([], [request(7, 4)], blocks=3).missing_for_next() == 0
    assert pool_with([], [request(40, 4)], blocks=6).missing_for_next() == 6
    # a decode at a block's end needs one more, elsewhere none
    assert (
        pool_with([(request(8, 9, computed=8, output=1), 2)], [], blocks=3).missing_for_next() == 1
    )
    assert (
        pool_with([(request(6, 9, computed=6, output=1), 2)], [], blocks=3).missing_for_next() == 0
    )
    # a partial prefill needs what the step's budget of eight tokens reaches
    assert pool_with([(request(40, 4, computed=8), 2)], [], blocks=3).missing_for_next() == 2
    assert pool_with([(request(40, 4, computed=8), 11)], [], blocks=12).missing_for_next() == 0
    # what several need together, less what is free
    several = [(request(8, 9, computed=8, output=1), 2), (request(12, 9, computed=12, output=1), 3)]
    assert pool_with(several, [], blocks=7).missing_for_next() == 1
    assert pool_with(several, [request(3, 1)], blocks=7).missing_for_next() == 2
    # what came with its KV and waits for its first step has most of its blocks
    pool = pool_with([(request(8, 9, computed=7), 2)], [], blocks=3)
    pool.scheduler.running, pool.scheduler.kv_holding_waiting = [], pool.scheduler.running
    assert pool.missing_for_next() == 1
    assert pool.missing_for_running() == 0


def test_blocks_missing_to_start_are_those_of_requests_that_may_run() -> None:
    """First what came with its KV, then the first that wait: as many as may run beside the running
    ones.
    """
    running, waiting = (
        [(request(8, 9, computed=8, output=1), 2)],
        [request(8, 4), request(9, 4), request(10, 4)],
    )
    pool = pool_with(running, waiting, blocks=3)
    for most, missing in ((1, 1), (2, 1 + 3), (3, 1 + 3 + 3), (9, 1 + 3 + 3 + 3)):
        pool.scheduler.max_num_running_reqs = most
        assert pool.missing_for_next(may_start(pool.scheduler)) == missing
    assert pool.missing_for_next() == 10
    pool.scheduler.running, pool.scheduler.kv_holding_waiting = [], pool.scheduler.running
    pool.scheduler.max_num_running_reqs = 1
    assert pool.missing_for_next(may_start(pool.scheduler)) == 1


def test_blocks_of_requests_are_counted_without_a_copy_of_their_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups count before each step, and requests have thousands of blocks."""
    pool = pool_with([(request(8, 9, computed=8, output=1), 2)], [request(8, 4)], blocks=3)

    def copied(request_id: str) -> Any:
        raise AssertionError(f"the block ids of {request_id} are copied")

    monkeypatch.setattr(pool.scheduler.kv_cache_manager, "get_block_ids", copied)
    counts = (
        pool.missing_for_next(),
        pool.missing_for_running(),
        pool.needed_by_running(),
        pool.reserved(),
    )
    assert counts == (4, 1, 1, 6)


@given(
    prompt=st.integers(1, 40),
    computed=st.integers(0, 40),
    output=st.integers(0, 20),
    held=st.integers(0, 12),
    blocks=st.integers(2, 20),
)
def test_never_fewer_blocks_than_the_step_writes_to(
    prompt: int, computed: int, output: int, held: int, blocks: int
) -> None:
    """And at most one more than that, or than the whole prompt."""
    tokens = prompt + output
    assume(
        computed < tokens
        and (output == 0 or computed >= prompt - 1)
        and held < blocks
        and held * 4 >= computed
    )
    pool = pool_with([(request(prompt, 30, computed, output), held)], [], blocks)
    written = tokens if computed == 0 else min(tokens, computed + 8)
    needed = max(0, -(-written // 4) - held - pool.free_count())
    assert needed == pool.missing_for_running() <= pool.missing_for_next() <= needed + 1


@pytest.mark.parametrize(("outstanding", "missing"), [(0, 0), (1, 1)])
def test_token_of_an_outstanding_step_needs_a_place(outstanding: int, missing: int) -> None:
    """Eight tokens fill the two blocks that the request has, and no other block is free."""
    asking = request(6, 20, 7 + outstanding, 2, outstanding)
    pool = pool_with([(asking, 2)], [], blocks=3)
    assert pool.missing_for_running() == missing
    assert pool.needed_by_running() == 1


@pytest.mark.parametrize(("prompt", "max_tokens"), [(6, 3), (62, 20)])
def test_outstanding_last_token_needs_no_place(prompt: int, max_tokens: int) -> None:
    """By the request's limit, or the model's: no step follows, so the group waits for no block."""
    tokens = min(prompt + max_tokens, 64) - 1
    asking = request(prompt, max_tokens, tokens, tokens - prompt, 1)
    pool = pool_with([(asking, -(-tokens // 4))], [], blocks=1 - (-tokens // 4))
    assert pool.missing_for_running() == 0
