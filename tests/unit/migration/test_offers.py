"""Offers in memory that peers map: what readers see, and that no copy of what was used again ever
counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from flying_serving.errors import PeerMemory
from flying_serving.layout.groups import KVSource
from flying_serving.migration.offers import ENTRIES, Offer, OfferTable, PeerOffers, make_table
from harness.examples import examples

BLOCKS = 12
CLOSED = Offer(0, is_final=True, blocks=[])


def tables(offer_blocks: int = BLOCKS, engine_blocks: int = 20) -> tuple[OfferTable, OfferTable]:
    """The owner's, and a peer's over the same memory."""
    memory = memoryview(bytearray(OfferTable.size_bytes(offer_blocks, engine_blocks)))
    owner, peer = (OfferTable(memory, offer_blocks, engine_blocks) for _ in range(2))
    return owner, peer


def test_offer_grows_until_it_is_final() -> None:
    """Tokens, and the blocks that have them. It tells of the hits among them."""
    owner, peer = tables()
    assert peer.read(5) is None
    for tokens, blocks, final in ((3, [7], False), (9, [7, 2, 4], False), (11, [7, 2, 4], True)):
        owner.publish(5, tokens, blocks, final=final, hit_tokens=2)
        assert peer.read(5) == Offer(tokens, final, blocks, hit_tokens=2)
    assert peer.read(4) is None
    assert peer.read(6) is None


@pytest.mark.parametrize("opened", [True, False])
def test_a_revoked_offer_has_no_tokens_and_will_not_have_any(opened: bool) -> None:
    """Whether it was opened before or not: who waits for it knows."""
    owner, peer = tables()
    if opened:
        owner.publish(5, 9, [7, 2, 4], final=False)
    for _ in range(2):
        owner.revoke(5)
        assert peer.read(5) == CLOSED


def test_a_later_number_takes_the_slot() -> None:
    """For good: the earlier one stays revoked, whatever its owner does."""
    owner, peer = tables()
    early, outdated = 5, 5 + ENTRIES
    owner.publish(early, 9, [7, 2, 4], final=True)
    assert peer.read(outdated) is None
    owner.publish(outdated, 1, [3], final=False)
    for act in (
        lambda: owner.publish(early, 10, [7, 2, 4], final=True),
        lambda: owner.revoke(early),
    ):
        assert peer.read(early) == CLOSED
        assert peer.read(outdated) == Offer(1, is_final=False, blocks=[3])
        act()
    assert peer.read(early) == CLOSED
    assert peer.read(outdated) == Offer(1, is_final=False, blocks=[3])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_blocks_of_a_group_are_found_on_each_engine(size: int) -> None:
    """Those that it has lent to the group of this size; of lane 1 they are its own; block 0 is
    block 0.
    """
    owner, peer = tables()
    for other in {2, 4, 8} - {size}:
        owner.lend(other, 3, 11)
    for mine, block in ((3, 17), (19, 1), (3, 5)):
        owner.lend(size, mine, block)
    assert peer.physical(size, [19, 3, 0, 19]) == [1, 5, 0, 1]
    assert peer.physical(1, [19, 3, 0]) == [19, 3, 0]


def test_peers_find_tables_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by the first engine of the group that offers; the blocks of any."""
    made = [make_table(str(tmp_path), engine, 4, 9) for engine in range(2)]
    made[0].publish(1, 6, [8, 3], final=False)
    made[1].publish(1, 2, [5], final=True)
    made[1].lend(2, 8, 4)
    gone: set[int] = set()
    peers = PeerOffers(str(tmp_path), gone.__contains__)
    assert peers.read(KVSource((0, 1), 1)) == Offer(6, is_final=False, blocks=[8, 3])
    assert peers.read(KVSource((1,), 1)) == Offer(2, is_final=True, blocks=[5])
    assert peers.physical(1, 2, [8]) == [4]
    made[0].revoke(1)
    assert peers.read(KVSource((0, 1), 1)) == CLOSED
    gone.add(1)  # its groups' are revoked, once the server says so
    assert peers.read(KVSource((1,), 1)) == peers.read(KVSource((0, 1), 2)) == CLOSED
    assert peers.physical(1, 2, [8]) == [4]  # who copies may go on
    gone.clear()
    make_table(str(tmp_path), 1, 4, 9).publish(7, 3, [2], final=True)  # another process
    assert peers.read(KVSource((1,), 1)) == Offer(2, is_final=True, blocks=[5])
    peers.map([1])
    assert peers.read(KVSource((1,), 7)) == Offer(3, is_final=True, blocks=[2])
    monkeypatch.setattr("flying_serving.memory.arena.ANNOUNCED_S", 0.05)
    with pytest.raises(PeerMemory, match=r"offers of engine 2: not announced in .*/offers-2"):
        peers.read(KVSource((2,), 1))


def test_blocks_that_an_engine_does_not_share_are_never_read(tmp_path: Path) -> None:
    """Here the last three of engine 1: an offer with one of them counts as revoked."""
    first, second = (make_table(str(tmp_path), e, 4, 9, blocks) for e, blocks in ((0, 9), (1, 6)))
    peers = PeerOffers(str(tmp_path), lambda engine: False)
    for table, block in ((first, 7), (second, 5)):
        table.lend(2, 1, block)
        table.lend(2, 2, block + 1)
    first.publish(1, 2, [1], final=True)
    first.publish(2, 4, [1, 2], final=True)
    first.publish(3, 4, [8], final=True)
    second.publish(4, 4, [6], final=True)
    assert peers.read(KVSource((0, 1), 1)) == Offer(2, is_final=True, blocks=[1])
    assert peers.read(KVSource((0, 1), 2)) == CLOSED
    assert peers.read(KVSource((0,), 3)) == Offer(4, is_final=True, blocks=[8])
    assert peers.read(KVSource((1,), 4)) == CLOSED
    assert peers.physical(0, 2, [1, 2]) == [7, 8]
    assert (peers.physical(1, 2, [1, 2]), peers.physical(1, 1, [8, 5])) == ([5, 0], [0, 5])


def test_the_table_of_a_lost_engine_is_unmapped(tmp_path: Path) -> None:
    """Until it is there again."""
    make_table(str(tmp_path), 9, 4, 9)
    maps = Path("/proc/self/maps")
    gone: set[int] = set()
    peers = PeerOffers(str(tmp_path), gone.__contains__)
    before = maps.read_text().count("memfd:flying-offers-9")
    peers.map([9])
    assert maps.read_text().count("memfd:flying-offers-9") == before + 1
    gone.add(9)
    peers.unmap([9])
    assert maps.read_text().count("memfd:flying-offers-9") == before
    assert not peers.is_present((8, 9)) and peers.is_present((10, 11))
    assert peers.read(KVSource((8, 9), 1)) == CLOSED
    assert maps.read_text().count("memfd:flying-offers-9") == before


# ---- between any two accesses


class Row:
    """A head whose accesses are told, each before it is made."""

    def __init__(self, row: np.ndarray, told: Callable[[], None]) -> None:
        self._row, self._told = row, told

    def __getitem__(self, index: int) -> Any:
        self._told()
        return self._row[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._told()
        self._row[index] = value


class Interrupted:
    """In place of a table's heads: before access number `at`, or each, `act` takes place."""

    def __init__(self, table: OfferTable, at: int | None, act: Callable[[], None]) -> None:
        self._heads, self._left, self._act = table._heads, at, act
        table._heads = self  # type: ignore[assignment]

    def __getitem__(self, slot: int) -> Row:
        return Row(self._heads[slot], self._told)

    def _told(self) -> None:
        if self._left is not None:
            self._left -= 1
        if self._left is None or self._left == -1:
            self._act()


@dataclass
class History:
    """What an owner does in turn with one number, another that takes its slot, and one that had
    it.
    """

    steps: list[tuple[int, int, bool]]

    def acts(self, owner: OfferTable) -> Iterator[Callable[[], None]]:
        """Each of them; negative tokens revoke. A token has a block of its own, which says whose it
        is.
        """
        for number, tokens, final in self.steps:
            if tokens < 0:
                yield lambda number=number: owner.revoke(number)  # type: ignore[misc]
            else:
                blocks = [100 * (number // ENTRIES + 1) + n for n in range(tokens + 1)]
                yield lambda n=number, t=tokens, b=blocks, f=final: owner.publish(n, t, b, final=f)  # type: ignore[misc]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Numbers come one after the other; each grows, and is final or revoked, and not opened
    again.
    """
    steps = []
    for number in (5, 5 + ENTRIES, 5 + 2 * ENTRIES):
        tokens = 0
        for more in draw(st.lists(st.integers(1, 3), max_size=3)):
            tokens += more
            steps.append((number, tokens, False))
        end = draw(st.sampled_from(["final", "revoked", "final, revoked", "none"]))
        if "final" in end:
            steps.append((number, tokens, True))
        if "revoked" in end:
            steps.append((number, -1, True))
    return History(steps)


def check(found: Offer | None, number: int, seen: list[tuple[int, int, bool]]) -> None:
    """What is read is what was so at some time up to now; and final only if there will be no
    more.
    """
    mine = [step for step in seen if step[0] == number]
    if found is None:
        return
    assert len(found.blocks) >= found.tokens
    assert list(found.blocks[: found.tokens]) == [
        100 * (number // ENTRIES + 1) + n for n in range(found.tokens)
    ]
    assert found.tokens in {0, *(tokens for _, tokens, _ in mine)}
    if found.is_final:
        over = any(final for _, _, final in mine) or any(step[0] > number for step in seen)
        assert over
    if found.tokens and found.is_final:
        assert (number, found.tokens, True) in mine


@settings(max_examples=examples(150), deadline=None)
@given(
    histories(), st.sampled_from([5, 5 + ENTRIES, 5 + 2 * ENTRIES]), st.integers(0, 9), st.data()
)
def test_a_read_in_the_middle_of_which_the_owner_acts(
    history: History, number: int, at: int, data: st.DataObject
) -> None:
    """However much it does then: the slot may have gone to two others."""
    owner, peer = tables()
    before = data.draw(st.integers(0, len(history.steps)))
    during = data.draw(st.integers(before, len(history.steps)))
    acts = list(history.acts(owner))
    for act in acts[:before]:
        act()

    def go_on() -> None:
        for act in acts[before:during]:
            act()

    Interrupted(peer, at, go_on)
    check(peer.read(number), number, history.steps[:during])


@settings(max_examples=examples(150), deadline=None)
@given(histories(), st.sampled_from([5, 5 + ENTRIES, 5 + 2 * ENTRIES]))
def test_read_between_stores_of_the_owner_sees_a_whole_offer(history: History, number: int) -> None:
    """Between any two of its stores."""
    owner, peer = tables()
    found: list[tuple[Offer | None, int]] = []
    done = 0
    Interrupted(owner, None, lambda: found.append((peer.read(number), done)))
    for act in history.acts(owner):
        act()
        done += 1
    for offer, until in found:
        check(offer, number, history.steps[: until + 1])


# ---- copies


@dataclass
class Made:
    """A request of the owner: its blocks, one for each token and one more, and tokens that it
    has.
    """

    number: int
    blocks: list[int]
    tokens: int = 0
    over: bool = False


@dataclass
class Copy:
    """A reader's: what it has copied of the first `stop` tokens."""

    number: int
    blocks: list[int]
    stop: int
    copied: list[tuple[int, int]] = field(default_factory=list)


class Copies(RuleBasedStateMachine):
    """An owner computes, offers, revokes and uses blocks again, while readers copy block by
    block.
    """

    requests = Bundle("requests")
    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.peer = tables()
        self.free = list(range(BLOCKS))
        self.content = [(0, 0)] * BLOCKS
        self.number = 0
        self.made: list[Made] = []

    @rule(target=requests, later=st.sampled_from([1, 1, ENTRIES]), count=st.integers(1, 4))
    def begin(self, later: int, count: int) -> Any:
        """A request comes, if there is room; blocks are used again in the order in which they were
        freed.
        """
        if len(self.free) <= count:
            return multiple()
        self.number += later
        made = Made(self.number, [self.free.pop(0) for _ in range(count + 1)])
        for block in made.blocks:
            self.content[block] = (-made.number, block)
        self.made.append(made)
        return made

    @rule(made=requests)
    def compute(self, made: Made) -> None:
        """A token more is there, and offered."""
        if not made.over and made.tokens < len(made.blocks) - 1:
            self.content[made.blocks[made.tokens]] = (made.number, made.tokens)
            made.tokens += 1
            self.owner.publish(
                made.number, made.tokens, made.blocks, final=made.tokens == len(made.blocks) - 1
            )

    @rule(made=consumes(requests))
    def free_blocks(self, made: Made) -> None:
        """It is aborted, preempted, released, or overdue."""
        self.owner.revoke(made.number)
        made.over = True
        self.free += made.blocks

    @rule(target=copies, data=st.data())
    def look(self, data: st.DataObject) -> Any:
        """A reader looks for any number that there was."""
        if not self.made:
            return multiple()
        made = data.draw(st.sampled_from(self.made))
        offer = self.peer.read(made.number)
        if offer is None or not offer.tokens:
            return multiple()
        return Copy(made.number, list(offer.blocks), data.draw(st.integers(1, offer.tokens)))

    @rule(copy=copies)
    def copy_block(self, copy: Copy) -> None:
        """The next block."""
        if len(copy.copied) < copy.stop:
            copy.copied.append(self.content[copy.blocks[len(copy.copied)]])

    @rule(copy=consumes(copies))
    def end(self, copy: Copy) -> None:
        """It counts if so many tokens are still offered; then it is what it should be."""
        while len(copy.copied) < copy.stop:
            self.copy_block(copy)
        offer = self.peer.read(copy.number)
        if offer is not None and offer.tokens >= copy.stop:
            assert copy.copied == [(copy.number, token) for token in range(copy.stop)]

    @invariant()
    def what_stands_is_offered(self) -> None:
        """But for those whose slot a later one took."""
        latest = {made.number % ENTRIES: made for made in self.made if made.tokens or made.over}
        for made in self.made:
            offer = self.peer.read(made.number)
            if latest.get(made.number % ENTRIES) is made and not made.over:
                assert offer == Offer(made.tokens, made.tokens == len(made.blocks) - 1, made.blocks)
            elif made.over:
                assert offer == CLOSED


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=examples(80), stateful_step_count=40)
