"""Blocks that lanes lend each other: a lane that has none to lend is to free what it keeps of
requests that left it.
"""

from typing import Any

import pytest

from flying_serving.engine.block_lending import BlockLending
from flying_serving.engine.group import ASK_AGAIN_S
from flying_serving.engine.messages import BlocksReserved, RecallBlocks, ReserveBlocks
from tests.with_vllm.engine.pairs import GROUP, Pair
from tests.with_vllm.engine.schedulers import BLOCK

BLOCKS = 12  # beside the null block


class Keeper:
    """The first engine of a pair. It keeps blocks of requests that have left, and is told when they
    are needed.
    """

    def __init__(self) -> None:
        self.pair = Pair(lend_blocks=5)
        self.asked: list[int] = []
        self.kept: dict[int, list[int]] = {1: [], 2: []}
        source: Any = self
        self.block_lending = BlockLending(self.pair.parts[0].lanes(), source, lambda: 1.0)

    def keep(self, size: int, count: int) -> None:
        """Some blocks of a lane are kept from now on."""
        self.kept[size] = self._pool(size).take(count)

    def _pool(self, size: int) -> Any:
        return self.pair.pools[0] if size == 1 else self.pair.leader.pool

    def retains_any(self, size: int) -> bool:
        """Whether any blocks of a lane are kept."""
        return bool(self.kept[size])

    def yield_blocks(self, size: int, now_s: float) -> None:
        """Free the blocks that are kept of a lane, and note that it was asked for."""
        self.asked.append(size)
        self._pool(size).give(self.kept[size])
        self.kept[size] = []


@pytest.mark.parametrize(("kept", "asked"), [(BLOCKS, [1]), (BLOCKS - 1, [])])
def test_member_without_a_block_to_lend_frees_retained_blocks(kept: int, asked: list[int]) -> None:
    keeper = Keeper()
    keeper.keep(1, kept)
    keeper.block_lending.handle(ReserveBlocks(GROUP, 3, 3))
    assert keeper.asked == asked
    assert len(keeper.pair.members[0].lent.reserved) == (3 if asked else 1)


@pytest.mark.parametrize(("kept", "asked"), [(5, [2]), (4, [])])
def test_leader_without_a_block_to_return_frees_retained_blocks(
    kept: int, asked: list[int]
) -> None:
    keeper = Keeper()
    keeper.pair.lend(1)
    keeper.pair.scheduler.end("first")
    keeper.keep(2, kept)
    keeper.block_lending.handle(RecallBlocks(GROUP, 1, 2))
    assert keeper.asked == asked
    assert len(keeper.pair.leader.borrowed.held) == (3 if asked else 4)


@pytest.mark.parametrize("others", [0, 2])
def test_group_without_lent_blocks_frees_retained_blocks(others: int) -> None:
    """When all have answered; they were asked first."""
    keeper = Keeper()
    keeper.pair.scheduler.add("r", BLOCK, 2)
    keeper.pair.leader.plan_step(ASK_AGAIN_S)
    keeper.block_lending.handle(BlocksReserved(GROUP, 0, 4))
    assert keeper.asked == []
    keeper.block_lending.handle(BlocksReserved(GROUP, 1, others))
    assert keeper.asked == ([] if others else [2])


@pytest.mark.parametrize("prompt", [BLOCK, 3 * BLOCK])
def test_group_with_all_blocks_frees_retained_blocks_for_a_request(prompt: int) -> None:
    """There is none to ask members for: whether the request waits in its lane, or comes with its
    KV.
    """
    keeper = Keeper()
    keeper.pair.leader.borrowed.add(keeper.pair.leader.borrowed.choose(BLOCKS))
    keeper.keep(2, BLOCKS - 2)
    keeper.pair.scheduler.add("r", prompt - 1, 2)
    keeper.block_lending.yield_if_all_are_lent(2)
    assert keeper.asked == ([] if prompt == BLOCK else [2])
    keeper.block_lending.ask(2, 1)
    assert keeper.asked[-1] == 2
    assert keeper.pair.kinds(0) == []


def test_group_without_retained_blocks_counts_no_missing_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes before each of its steps, and to count them is to look at each of its requests."""
    keeper = Keeper()
    keeper.pair.leader.borrowed.add(keeper.pair.leader.borrowed.choose(BLOCKS))
    keeper.pair.scheduler.add("r", 20 * BLOCK, 2)
    looked_at = looks(monkeypatch, keeper.pair.scheduler)
    keeper.block_lending.yield_if_all_are_lent(2)
    keeper.pair.leader.plan_step(ASK_AGAIN_S)
    assert keeper.asked == []
    assert looked_at == []


def test_group_frees_no_block_for_a_request_that_may_not_run_yet() -> None:
    keeper = Keeper()
    keeper.pair.leader.borrowed.add(keeper.pair.leader.borrowed.choose(BLOCKS))
    keeper.keep(2, BLOCKS - 2)
    keeper.pair.scheduler.max_num_running_reqs = 1
    keeper.pair.scheduler.add("r", BLOCK - 1, 2)
    keeper.pair.scheduler.schedule()
    keeper.pair.scheduler.add("waits", 3 * BLOCK, 2)
    keeper.block_lending.yield_if_all_are_lent(2)
    assert keeper.asked == []


def looks(monkeypatch: pytest.MonkeyPatch, scheduler: Any) -> list[str]:
    """Return the requests whose blocks are looked at from now on."""
    looked_at: list[str] = []
    look = scheduler.kv_cache_manager.get_block_ids

    def noted(request_id: str) -> Any:
        looked_at.append(request_id)
        return look(request_id)

    monkeypatch.setattr(scheduler.kv_cache_manager, "get_block_ids", noted)
    return looked_at
