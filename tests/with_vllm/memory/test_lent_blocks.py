"""Lending: whatever engines and groups do, each physical block has one owner and members agree on
what is lent.

The machine plays several engines and all their groups over the real LentBlocks and BorrowedBlocks.
What leaders say reaches members in order but late, as it does in a server: a member's tables are
behind until it has read its inbox.
"""

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flying_serving.errors import IntegrityError
from flying_serving.layout.groups import Group, Layout
from flying_serving.memory.lent_blocks import NULL_BLOCK, BorrowedBlocks, LentBlocks
from harness.examples import examples
from tests.with_vllm.memory.pools import PlainPool, VllmPool

BLOCKS = 13
AnyPool = PlainPool | VllmPool


class LendingEngine:
    """An engine's physical pool, its own requests' blocks, what it lent, and what it has not read
    yet.
    """

    def __init__(self, pool: AnyPool, groups: list[Group]) -> None:
        self.pool = pool
        self.owned: list[int] = []
        self.shown: dict[Group, dict[int, int]] = {
            group: {NULL_BLOCK: NULL_BLOCK} for group in groups
        }
        self.lent = {group: LentBlocks(pool, self.shown[group].__setitem__) for group in groups}
        self.inbox: deque[tuple[str, Group, Any]] = deque()

    def outside(self) -> set[int]:
        """Return what is lent to any group, or reserved for one."""
        return set().union(*(lent.physical() for lent in self.lent.values()))


class GroupState:
    """A group's borrowed blocks, what its requests use, and the lending round that is open."""

    def __init__(self, group: Group, pool: AnyPool) -> None:
        self.group = group
        self.pool = pool
        self.borrowed = BorrowedBlocks(pool)
        self.used: list[int] = []
        self.reserved: dict[int, int] | None = None
        self.asked = 0


class Lending(RuleBasedStateMachine):
    """Engines 0..n-1 with all their aligned groups."""

    engines = 2
    make: Callable[[int], AnyPool] = PlainPool

    def __init__(self) -> None:
        super().__init__()
        sizes = [size for size in (2, 4) if size <= self.engines]
        groups = [group for size in sizes for group in Layout.uniform(self.engines, size).groups]
        self.members = [
            LendingEngine(type(self).make(BLOCKS), [group for group in groups if engine in group])
            for engine in range(self.engines)
        ]
        self.groups = [GroupState(group, type(self).make(BLOCKS)) for group in groups]
        self.names = count()

    def a_group(self, number: int) -> GroupState:
        return self.groups[number % len(self.groups)]

    def tell(self, group: Group, kind: str, content: Any) -> None:
        for member in group:
            self.members[member].inbox.append((kind, group, content))

    # ---- an engine's own requests

    @rule(engine=st.integers(0, 3), count=st.integers(1, 5))
    def begin_locally(self, engine: int, count: int) -> None:
        member = self.members[engine % self.engines]
        blocks = member.pool.take(min(count, member.pool.free_count()))
        member.owned += blocks
        for block in blocks:
            member.pool.remember(block, b"%d" % next(self.names))

    @rule(engine=st.integers(0, 3), freed=st.integers(1, 8), data=st.data())
    def end_locally(self, engine: int, freed: int, data: st.DataObject) -> None:
        member = self.members[engine % self.engines]
        member.owned = data.draw(st.permutations(member.owned))
        member.pool.give(member.owned[:freed])
        del member.owned[:freed]

    # ---- what leaders do

    @rule(number=st.integers(0, 2), count=st.integers(1, 8))
    def ask(self, number: int, count: int) -> None:
        state = self.a_group(number)
        if state.reserved is None and state.borrowed.room():
            state.reserved, state.asked = {}, min(count, state.borrowed.room())
            self.tell(state.group, "ask", state.asked)

    @rule(number=st.integers(0, 2), count=st.integers(1, 4))
    def use(self, number: int, count: int) -> None:
        state = self.a_group(number)
        blocks = state.pool.take(min(count, state.borrowed.free_count()))
        state.used += blocks
        for block in blocks:
            state.pool.remember(block, b"%d" % next(self.names))

    @rule(number=st.integers(0, 2), freed=st.integers(1, 4), data=st.data())
    def stop_using(self, number: int, freed: int, data: st.DataObject) -> None:
        state = self.a_group(number)
        state.used = data.draw(st.permutations(state.used))
        state.pool.give(state.used[:freed])
        del state.used[:freed]

    @rule(number=st.integers(0, 2))
    def step(self, number: int) -> None:
        state = self.a_group(number)
        self.tell(state.group, "step", list(state.used))

    @rule(number=st.integers(0, 2), count=st.integers(1, 8))
    def give_up(self, number: int, count: int) -> None:
        state = self.a_group(number)
        before = state.borrowed.free_count()
        blocks = state.borrowed.give_up(count)
        assert len(blocks) == min(count, before)
        assert not set(blocks) & set(state.used)
        if blocks:
            self.tell(state.group, "return", blocks)

    # ---- what members do

    @precondition(lambda self: any(member.inbox for member in self.members))
    @rule(engine=st.integers(0, 3), keep_free=st.integers(0, 5))
    def serve(self, engine: int, keep_free: int) -> None:
        readers = [e for e, member in enumerate(self.members) if member.inbox]
        self.serve_one(readers[engine % len(readers)], keep_free)

    def serve_one(self, engine: int, keep_free: int) -> None:
        member = self.members[engine]
        kind, group, content = member.inbox.popleft()
        lent = member.lent[group]
        if kind == "ask":
            spare = max(0, min(content, member.pool.free_count() - keep_free))
            assert lent.reserve(spare) == spare
            self.answer(group, engine, spare)
        elif kind == "lend":
            reserved = list(lent.reserved)
            lent.commit(content)
            assert lent.translate(content) == reserved[: len(content)]
            assert lent.reserved == []
        elif kind == "return":
            lent.take_back(content)
        else:
            physical = lent.translate(content)
            assert len(set(physical)) == len(content)
            assert not set(physical) & (
                member.pool.free_blocks() | set(member.owned) | {NULL_BLOCK}
            )

    def answer(self, group: Group, engine: int, reserved: int) -> None:
        (state,) = [state for state in self.groups if state.group == group]
        assert state.reserved is not None
        state.reserved[engine] = reserved
        if len(state.reserved) == len(group):
            least = min(state.reserved.values())
            blocks = state.borrowed.choose(least)
            assert len(blocks) == least <= state.asked
            state.reserved = None
            self.tell(group, "lend", blocks)
            state.borrowed.add(blocks)

    @rule()
    def read_everything(self) -> None:
        while any(member.inbox for member in self.members):
            for engine, member in enumerate(self.members):
                if member.inbox:
                    self.serve_one(engine, 0)
        for state in self.groups:
            assert state.reserved is None
            for engine in state.group:
                assert set(self.members[engine].lent[state.group].table) == state.borrowed.held | {
                    NULL_BLOCK
                }

    @rule()
    def return_everything(self) -> None:
        for state in self.groups:
            state.pool.give(state.used)
            state.used = []
        self.read_everything()
        for state in self.groups:
            self.tell(state.group, "return", state.borrowed.give_up(BLOCKS))
        self.read_everything()
        for member in self.members:
            assert member.pool.free_count() == BLOCKS - 1 - len(member.owned)

    # ---- what always holds

    @invariant()
    def each_physical_block_is_one_of_free_owned_reserved_and_lent(self) -> None:
        for member in self.members:
            free, outside = member.pool.free_blocks(), member.outside()
            reserved = [block for lent in member.lent.values() for block in lent.reserved]
            lent = [
                p for lent in member.lent.values() for v, p in lent.table.items() if v != NULL_BLOCK
            ]
            assert sorted([*free, *member.owned, *reserved, *lent]) == list(range(1, BLOCKS))
            assert outside == {*reserved, *lent}
            for group, books in member.lent.items():
                assert books.table.items() <= member.shown[group].items()
            if isinstance(member.pool, VllmPool):
                member.pool.check_owned(member.owned, outside)

    @invariant()
    def each_group_block_is_one_of_free_used_and_withheld(self) -> None:
        for state in self.groups:
            state.borrowed.check()
            withheld = state.borrowed._withheld
            assert sorted([*state.pool.free_blocks(), *state.used, *withheld]) == list(
                range(1, BLOCKS)
            )
            assert state.borrowed.room() == len(withheld)
            assert state.borrowed.in_use == len(state.used)
            if isinstance(state.pool, VllmPool):
                state.pool.check_owned(state.used, set(withheld))

    @invariant()
    def nothing_outside_a_pool_is_cached_in_it(self) -> None:
        for member in self.members:
            for name in range(self.names_given()):
                assert member.pool.remembers(b"%d" % name) not in member.outside()
        for state in self.groups:
            for name in range(self.names_given()):
                assert state.pool.remembers(b"%d" % name) not in state.borrowed._withheld

    def names_given(self) -> int:
        return int(repr(self.names)[len("count(") : -1])


@pytest.mark.parametrize("engines", [2, 4])
@pytest.mark.parametrize("make", [PlainPool, VllmPool])
def test_blocks_have_one_owner(engines: int, make: type[AnyPool]) -> None:
    """With a pool that does nothing but the protocol, and with vLLM's; one group, and three that
    nest.
    """
    machine = type("Machine", (Lending,), {"engines": engines, "make": make})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
    )


# ---- wrong use


def lent_blocks(reserved: int) -> tuple[PlainPool, LentBlocks]:
    """Return a pool of ten blocks and the books in which some are reserved."""
    pool = PlainPool(11)
    lent = LentBlocks(pool, {}.__setitem__)
    assert lent.reserve(reserved) == reserved
    return pool, lent


def test_a_second_reservation_before_the_commit_is_refused() -> None:
    """A leader has one round open at a time."""
    _, lent = lent_blocks(2)
    with pytest.raises(IntegrityError, match="3 blocks to reserve while 2 are still reserved"):
        lent.reserve(3)


def test_a_commit_of_more_than_was_reserved_is_refused() -> None:
    """Both numbers are said."""
    _, lent = lent_blocks(2)
    with pytest.raises(IntegrityError, match="commit of 3 blocks, 2 reserved"):
        lent.commit([4, 5, 6])


@pytest.mark.parametrize("again", [[4], [5, 4], [NULL_BLOCK], [6, 6]])
def test_a_group_block_is_lent_once(again: list[int]) -> None:
    """Nor does the null block stand for another."""
    _, lent = lent_blocks(1)
    lent.commit([4])
    lent.reserve(2)
    with pytest.raises(IntegrityError, match=f"group block {again[-1]} is lent already"):
        lent.commit(again)


@pytest.mark.parametrize("wrong", [7, NULL_BLOCK])
def test_return_of_blocks_that_were_not_lent_is_refused(wrong: int) -> None:
    """And what was stays lent."""
    pool, lent = lent_blocks(2)
    lent.commit([4, 5])
    with pytest.raises(IntegrityError, match=rf"group blocks \[{wrong}\] returned but not lent"):
        lent.take_back([4, wrong])
    assert lent.lent_count == 2
    lent.take_back([4, 5])
    assert pool.free_count() == 10


def test_two_group_blocks_over_one_physical_block_are_noticed() -> None:
    """Also when it is reserved and lent at once."""
    _, lent = lent_blocks(2)
    lent.commit([4])
    lent.table[5] = lent.table[4]
    with pytest.raises(IntegrityError, match="2 lent and 0 reserved blocks overlap"):
        lent.physical()
    del lent.table[5]
    lent.reserved = [lent.table[4]]
    with pytest.raises(IntegrityError, match="1 lent and 1 reserved blocks overlap"):
        lent.physical()


def test_a_leaders_books_must_balance() -> None:
    """Held and withheld are all group blocks, and none is free that is not held."""
    pool = PlainPool(11)
    borrowed = BorrowedBlocks(pool)
    assert borrowed.capacity == 10
    assert borrowed.room() == 10
    assert borrowed.free_count() == 0
    assert borrowed.choose(3) == [1, 2, 3]
    with pytest.raises(IntegrityError, match=r"held 0 \+ withheld 7 != 10"):
        borrowed.check()
    borrowed.add([1, 2, 3])
    borrowed.check()
    borrowed.held.add(4)
    with pytest.raises(IntegrityError, match=r"held 4 \+ withheld 7 != 10"):
        borrowed.check()
    borrowed.held -= {3, 4}
    borrowed._withheld.append(3)
    with pytest.raises(IntegrityError, match="3 free group blocks, 2 held"):
        borrowed.check()


def test_choose_and_give_up_take_only_free_blocks() -> None:
    """And no more."""
    borrowed = BorrowedBlocks(PlainPool(4))
    assert borrowed.choose(9) == [1, 2, 3]
    assert borrowed.choose(1) == []
    borrowed.add([1, 2, 3])
    assert sorted(borrowed.give_up(9)) == [1, 2, 3]
    assert borrowed.give_up(1) == []
    assert borrowed.room() == 3


def test_the_null_block_stands_for_itself() -> None:
    """In every lane; it is never counted, lent or returned."""
    _, lent = lent_blocks(1)
    lent.commit([3])
    assert lent.translate([NULL_BLOCK, 3, NULL_BLOCK]) == [NULL_BLOCK, lent.table[3], NULL_BLOCK]
    assert lent.lent_count == 1
    assert NULL_BLOCK not in lent.physical()


def test_engine_reserves_no_more_blocks_than_are_free() -> None:
    pool = PlainPool(11)
    lent = LentBlocks(pool, {}.__setitem__)
    assert lent.reserve(12) == 10
    lent.commit([])
    assert pool.free_count() == 10
