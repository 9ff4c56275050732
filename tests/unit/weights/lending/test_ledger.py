"""PageLedger: every page has one owner, whatever goes and comes back."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flying_serving.errors import IntegrityError
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger

PAGE = 64


class Pages(RuleBasedStateMachine):
    """Pages by owner, kept beside the ledger one by one: those of each piece, and of each region of
    the extra KV.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger([], ExtraKV(0, [1]), PAGE)

    @rule(
        pieces=st.lists(st.integers(0, 20 * PAGE), min_size=1, max_size=6),
        kv=st.builds(
            ExtraKV,
            st.integers(0, 40),
            st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4),
        ),
    )
    @precondition(lambda self: not self.ledger.pieces)
    def begin(self, pieces: list[int], kv: ExtraKV) -> None:
        self.pieces, self.kv = pieces, kv
        self.ledger = PageLedger(pieces, kv, PAGE)

    @precondition(lambda self: self.ledger.dropped < self.ledger.pieces)
    @rule()
    def drop(self) -> None:
        assert self.ledger.drop() == self.ledger.dropped - 1
        self.ledger.check()

    @precondition(lambda self: self.ledger.pieces)
    @rule()
    def back(self) -> None:
        before = self.ledger.blocks
        assert list(self.ledger.back()) == list(range(before, self.ledger.blocks))
        assert self.ledger.blocks <= self.kv.most_blocks

    @precondition(lambda self: self.ledger.dropped)
    @rule()
    def fetch(self) -> None:
        room, dropped = self.ledger.room(self.ledger.dropped - 1), self.ledger.dropped
        if self.ledger.blocks > room:
            with pytest.raises(IntegrityError, match="extra blocks"):
                self.ledger.fetch()
            assert self.ledger.release(room).start == room
        assert self.ledger.fetch() == dropped - 1

    @precondition(lambda self: self.ledger.pieces)
    @rule(blocks=st.integers(0, 40))
    def release(self, blocks: int) -> None:
        before = self.ledger.blocks
        assert list(self.ledger.release(blocks)) == list(range(min(blocks, before), before))

    @precondition(lambda self: self.ledger.pieces)
    @invariant()
    def pages_have_one_owner(self) -> None:
        """Wherever in its first page a region of the extra KV begins."""
        ledger = self.ledger
        ledger.check()
        freed = sum(size // PAGE for size in self.pieces[: ledger.dropped])
        worst = sum(
            max(-(-(start + ledger.blocks * size_bytes) // PAGE) for start in range(PAGE))
            for size_bytes in self.kv.region_bytes
        )
        assert worst * bool(ledger.blocks) <= ledger.kv_pages <= freed
        assert ledger.kv_pages + ledger.free_pages == freed


TestPages = Pages.TestCase


def test_all_weights_come_back_only_when_kv_has_left() -> None:
    ledger = PageLedger([10 * PAGE, 10 * PAGE], ExtraKV(100, [PAGE, PAGE]), PAGE)
    assert ledger.drop() == 0
    assert list(ledger.back()) == [0, 1, 2, 3]
    assert ledger.drop() == 1
    assert list(ledger.back()) == [4, 5, 6, 7, 8]
    with pytest.raises(IntegrityError, match="all 2 pieces"):
        ledger.drop()
    with pytest.raises(
        IntegrityError, match="2 pieces of weights are gone, and KV has 9 extra blocks"
    ):
        ledger.fetch()
    assert list(ledger.release(4)) == [4, 5, 6, 7, 8]
    assert ledger.fetch() == 1
    assert list(ledger.release(0)) == [0, 1, 2, 3]
    assert ledger.fetch() == 0
    assert ledger.lent_bytes == 0
    assert ledger.free_pages == 0


def test_a_page_with_two_owners_is_told() -> None:
    ledger = PageLedger([10 * PAGE], ExtraKV(100, [PAGE, PAGE]), PAGE)
    ledger.drop()
    ledger.back()
    ledger.dropped = 0
    with pytest.raises(IntegrityError, match="10 pages belong to weights and to KV"):
        ledger.check()
