"""The KV groups of a model: layers that share a block table. All groups take blocks of one pool.

A model of attention alone has one group. Layers with recurrent state are groups of their own. A
block is a page of the same bytes in all groups. Pure, no torch, no vLLM.
"""

from collections.abc import Sequence

import msgspec

Blocks = Sequence[Sequence[int]]
"""Blocks of a request by group, in its order."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose blocks hold the same tokens of a request.

    `has_state`: a block holds no KV of single tokens, and the state after the last token. A request
    then has one block, as `block_tokens` is the length of the longest request.
    """

    block_tokens: int
    has_state: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of some tokens has in this group."""
        return -(-tokens // self.block_tokens)


class KVGroups(msgspec.Struct, frozen=True):
    """All KV groups of a lane, in vLLM's order."""

    groups: tuple[KVGroup, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens in one block of KV; of a model without attention those of a state."""
        paged = [group.block_tokens for group in self.groups if not group.has_state]
        return min(paged or (group.block_tokens for group in self.groups))

    @property
    def state_blocks(self) -> int:
        """Blocks that each request has for its state, whatever its length."""
        return sum(group.has_state for group in self.groups)

    @property
    def fixed_blocks(self) -> int:
        """Blocks of each request beside those that its length asks for: of state, if it has KV."""
        return self.state_blocks if self.state_blocks < len(self.groups) else 0

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of some tokens has in all groups."""
        return sum(group.blocks_for(tokens) for group in self.groups)

    def missing(self, tokens: int, owned: Blocks) -> int:
        """Return the blocks that a request needs beside those that it has, to hold `tokens`
        tokens.
        """
        pairs = zip(self.groups, owned, strict=True)
        return sum(max(0, group.blocks_for(tokens) - len(blocks)) for group, blocks in pairs)

    def made_up(self, tokens: int, first: int = 1) -> tuple[list[int], ...]:
        """Return blocks for a made-up request of some tokens, one after the other from `first`
        on.
        """
        blocks: list[list[int]] = []
        for group in self.groups:
            count = group.blocks_for(tokens)
            blocks.append(list(range(first, first + count)))
            first += count
        return tuple(blocks)


def one_group(block_tokens: int) -> KVGroups:
    """Return the groups of a model of attention alone."""
    return KVGroups((KVGroup(block_tokens),))
