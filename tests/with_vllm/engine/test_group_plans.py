"""A leader's plan in the physical blocks of a member."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from flying_serving.engine.group import in_physical_blocks
from flying_serving.memory.lent_blocks import NULL_BLOCK, LentBlocks
from tests.with_vllm.engine.schedulers import cached_requests, new_request
from tests.with_vllm.memory.pools import PlainPool


def lent(table: dict[int, int]) -> LentBlocks:
    """Return books by which these blocks are lent."""
    books = LentBlocks(PlainPool(100), {}.__setitem__)
    books.table.update(table)
    return books


def plan_of(
    new: list[tuple[list[int], ...]], cached: list[tuple[list[int], ...] | None], zero: Any
) -> SchedulerOutput:
    """Return a plan with requests of both kinds."""
    plan = SchedulerOutput.make_empty()
    plan.scheduled_new_reqs = [new_request(f"new{n}", 3, blocks) for n, blocks in enumerate(new)]
    plan.scheduled_cached_reqs = cached_requests([f"old{n}" for n in range(len(cached))], cached)
    plan.num_scheduled_tokens = {"new0": 3}
    plan.total_num_scheduled_tokens = 3
    plan.finished_req_ids = {"gone"}
    plan.new_block_ids_to_zero = zero
    return plan


IDS = st.lists(st.integers(0, 20), max_size=6)
ROWS = st.tuples(IDS) | st.tuples(IDS, IDS)


@given(
    new=st.lists(ROWS, max_size=4),
    cached=st.lists(st.none() | ROWS, max_size=4),
    zero=st.none() | IDS,
    order=st.permutations(range(1, 100)),
)
def test_only_blocks_of_a_plan_are_translated(
    new: list[Any], cached: list[Any], zero: Any, order: list[int]
) -> None:
    """The leader's plan stays as it is, and the null block stands for itself."""
    table = {NULL_BLOCK: NULL_BLOCK, **{v: order[v] for v in range(1, 21)}}
    plan = plan_of(new, cached, zero)
    before = copy.deepcopy(plan)
    mine = in_physical_blocks(plan, lent(table))
    assert plan == before

    def physical(rows: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return tuple([table[v] for v in blocks] for blocks in rows)

    assert [r.block_ids for r in mine.scheduled_new_reqs] == [physical(rows) for rows in new]
    found = mine.scheduled_cached_reqs.new_block_ids
    assert found == [None if rows is None else physical(rows) for rows in cached]
    assert mine.new_block_ids_to_zero == (None if zero is None else [table[v] for v in zero])
    restored = replace(
        mine,
        scheduled_new_reqs=[
            replace(r, block_ids=rows) for r, rows in zip(mine.scheduled_new_reqs, new, strict=True)
        ],
        scheduled_cached_reqs=replace(mine.scheduled_cached_reqs, new_block_ids=cached),
        new_block_ids_to_zero=zero,
    )
    assert restored == before


def test_a_plan_with_a_block_that_is_not_lent_is_an_error() -> None:
    """Not a write to somebody else's block."""
    with pytest.raises(KeyError, match="5"):
        in_physical_blocks(plan_of([([1, 5],)], [], None), lent({1: 9}))


def test_no_field_of_vllms_plan_names_blocks_that_are_not_translated() -> None:
    """A field that a new vLLM adds has to be looked at; copies between blocks need a hybrid model,
    which is refused.
    """
    block_fields = {f.name for f in fields(SchedulerOutput) if "block" in f.name}
    assert block_fields == {
        "new_block_ids_to_zero",
        "kv_cache_block_copies",
        "kv_connector_block_state",
        "num_common_prefix_blocks",
    }
    assert {f.name for f in fields(CachedRequestData) if "block" in f.name} == {"new_block_ids"}
    assert {f.name for f in fields(type(new_request("r", 1, ([],)))) if "block" in f.name} == {
        "block_ids"
    }
