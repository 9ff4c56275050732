"""What engines of the model see of each other's KV: the table of each, what another looks at there,
and what it sees.

Blocks of lane 1 go by other names outside their engine, as it renames its own (`alike.py`): by
their offer's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.copy_plan import copies
from flying_serving.migration.offers import Offer
from tests.with_vllm.engine.schedulers import BLOCK
from tests.with_vllm.protocol.memory import Memory

MOST_BLOCKS = 16
"""More than any request has."""


class Look(NamedTuple):
    """What of an engine another looks at: an offer, by number, or blocks of its lane of this size,
    by name.

    Or WHERE: which blocks it has lent to its group of this size, of those in the place of weights.
    """

    engine: int
    size: int
    what: int | tuple[int, ...] | str


WHERE = "where"
View = tuple[tuple[Look, Any], ...]
"""What is seen at one time: Offers, or of each block the tokens in it."""


class Table:
    """In place of an OfferTable: it says the same.

    Args:
        sizes: of the groups that offer, by number.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self._sizes = sizes
        self.extra = range(0)
        """Blocks in the place of weights. Others know them, by their negative numbers, as whatever
        they were lent.
        """
        self.offers: dict[int, Offer] = {}
        self.lent: dict[tuple[int, int], int] = {}

    def publish(
        self,
        number: int,
        tokens: int,
        blocks: Sequence[int],
        *,
        final: bool,
        hit_tokens: int = 0,
    ) -> None:
        """As in an OfferTable: blocks that were written are not written again. Nothing is hit."""
        assert hit_tokens == 0
        known = self.offers[number].blocks if number in self.offers else []
        self.offers[number] = Offer(tokens, final, [*known, *blocks[len(known) :]][: len(blocks)])

    def revoke(self, number: int) -> None:
        """As in an OfferTable."""
        self.publish(number, 0, [], final=True)

    def read(self, number: int) -> Offer | None:
        """As in an OfferTable."""
        return self.offers.get(number)

    def lend(self, size: int, group_block: int, block: int) -> None:
        """As in an OfferTable."""
        self.lent[size, group_block] = block

    def rename(self, new: Mapping[int, int], lent: Mapping[int, Mapping[int, int]]) -> None:
        """Give blocks other numbers, and forget which were lent once; `lent`: those that are, by
        size.
        """
        for number, offer in self.offers.items():
            if self._sizes[number] == 1:
                self.offers[number] = Offer(
                    offer.tokens, offer.is_final, [new[block] for block in offer.blocks]
                )
        self.lent = {
            (size, v): new[block] for (size, v), block in self.lent.items() if v in lent[size]
        }

    def shown(self, memory: Memory) -> tuple[dict[int, Offer], dict[tuple[int, int], Any]]:
        """Return what others can see: offers, and tokens in blocks, by size and name."""
        named = {
            (1, name): b
            for number, offer in self.offers.items()
            for name, b in self._named(number, offer)
        }
        rows = {key: memory.row(block) for key, block in (self.lent | named).items()}
        offers = {
            number: Offer(
                offer.tokens, offer.is_final, tuple(name for name, _ in self._named(number, offer))
            )
            for number, offer in self.offers.items()
        }
        rows |= {
            (size, -block): memory.row(block)
            for size in set(self._sizes.values())
            for block in self.extra
        }
        return offers, {key: row for key, row in rows.items() if any(row)}

    def where(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return group blocks, each with the block in the place of weights that it is."""
        return tuple(
            sorted(
                (v, block)
                for (of, v), block in self.lent.items()
                if of == size and block in self.extra
            )
        )

    def _named(self, number: int, offer: Offer) -> list[tuple[int, int]]:
        """Each of an offer's blocks, by its name."""
        if self._sizes[number] > 1:
            return [(block, block) for block in offer.blocks]
        return [(number * MOST_BLOCKS + place, block) for place, block in enumerate(offer.blocks)]


class Peers:
    """In place of PeerOffers: what an engine sees of all others is told beforehand."""

    def __init__(self) -> None:
        self.view: dict[Look, Any] = {}

    def read(self, source: KVSource) -> Offer | None:
        """Return the offer."""
        found: Offer | None = self.view[look_at(source)]
        return found

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        """Blocks go by the names of their lane here, but those that may move."""
        return names_of(blocks, self.view.get(Look(engine, size, WHERE), ()))

    def is_present(self, group: Group) -> bool:
        """Return that it is: the server ends when an engine has stopped."""
        return True

    def copy(
        self,
        source: Group,
        blocks: Mapping[int, Sequence[int]],
        reader: tuple[Group, int],
        tokens: range,
    ) -> list[Any]:
        """Return what is in the place of each token; None if it is not the same on all engines that
        are read.

        `reader`: a group, and the engine that copies for its part in it.
        """
        group, engine = reader
        rows = [
            self.view[Look(e, len(source), tuple(blocks[e]))]
            for e in engines_read(source, group, engine)
        ]
        found = [{row[place // BLOCK][place % BLOCK] for row in rows} for place in tokens]
        return [one.pop() if len(one) == 1 else None for one in found]


def look_at(source: KVSource) -> Look:
    """Return how an offer is looked at."""
    return Look(source.group[0], len(source.group), source.number)


def look_into(
    source: KVSource,
    blocks: Sequence[int],
    group: Group,
    engine: int,
    seen: Mapping[Look, Any] | None = None,
) -> list[Look]:
    """Return how an engine, for its part in `group`, looks at blocks; `seen`: where they were, if
    it has looked.
    """
    size, engines = len(source.group), engines_read(source.group, group, engine)
    return [
        Look(e, size, tuple(names_of(blocks, (seen or {}).get(Look(e, size, WHERE), ()))))
        for e in engines
    ]


def look_where(source: KVSource, group: Group, engine: int) -> list[Look]:
    """Return how an engine, for its part in `group`, looks where blocks are."""
    return [Look(e, len(source.group), WHERE) for e in engines_read(source.group, group, engine)]


def names_of(blocks: Sequence[int], where: tuple[tuple[int, int], ...]) -> list[int]:
    """Return what group blocks are called by who has seen where they are."""
    found = dict(where)
    return [-found[block] if block in found else block for block in blocks]


def engines_read(source: Group, target: Group, engine: int) -> list[int]:
    """Return from which engines one copies what it needs for its part in a group."""
    return sorted({place[0] for place, _ in copies(source, target, (engine, 0), 1, 4)})
