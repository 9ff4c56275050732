"""The KV groups of a model: layers that share a block table. All groups take blocks of one pool.

A model of attention alone has one group. Layers with recurrent state are groups of their own. A
block is a page of the same bytes in all groups. Pure, no torch, no vLLM.

Outside of vLLM's scheduler a request's blocks are one list. It begins with rows, from the first
token on: a block of each group with KV. The block of each state follows.
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
        """Blocks of state of each request, beside its KV. 0 for a model without KV."""
        return self.state_blocks if self.state_blocks < len(self.groups) else 0

    @property
    def row_blocks(self) -> int:
        """Blocks of a row: the groups with KV."""
        return len(self.groups) - self.state_blocks

    def may_offer(self, *, runs: bool) -> bool:
        """Return whether a request's blocks can be offered to another group; `runs`: steps of it
        are under way, or follow before the offer ends.

        A step adds KV to a request, and overwrites its state. A model without KV offers nothing.
        """
        return not self.state_blocks or (self.row_blocks > 0 and not runs)

    def usable_tokens(self, pulled: int, offered: int) -> int:
        """Return how many of a request's first tokens can be used where `pulled` of the `offered`
        ones are: with state all of them or none, as the state is that after the last one.
        """
        return 0 if self.state_blocks and pulled < offered else pulled

    def in_a_list(self, blocks: Blocks) -> list[int]:
        """Return a request's blocks of all groups as one list."""
        if len(self.groups) == 1:
            return list(blocks[0])
        pairs = list(zip(self.groups, blocks, strict=True))
        rows = zip(*(of_group for group, of_group in pairs if not group.has_state), strict=True)
        states = (block for group, of_group in pairs if group.has_state for block in of_group)
        return [*(block for row in rows for block in row), *states]

    def of_kv(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return those of a request's blocks that have KV, of a list of all."""
        return blocks[: len(blocks) - self.state_blocks]

    def beside_kv(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the last blocks of a list of all of a request: one of each state, without KV."""
        return blocks[len(blocks) - self.state_blocks :]

    def room_tokens(self, blocks: Sequence[int], more: int) -> int:
        """Return the tokens that a request's blocks hold together with `more` blocks."""
        if not blocks:
            more = max(0, more - self.fixed_blocks)
        rows = (len(self.of_kv(blocks)) + more) // max(1, self.row_blocks)
        return rows * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of some tokens has in all groups."""
        return sum(group.blocks_for(tokens) for group in self.groups)

    def most_blocks(self, longest_tokens: int) -> int:
        """Return the blocks that the longest request may have at most: one more of each group than
        its tokens need.
        """
        return self.blocks_for(longest_tokens) + len(self.groups)

    def most_requests(self, blocks: int) -> int:
        """Return the requests that some blocks hold at a time: each has one of every group at
        least.
        """
        return blocks // len(self.groups)

    def missing(self, tokens: int, owned: Blocks) -> int:
        """Return how many more blocks a request needs to hold `tokens` tokens. It has `owned`."""
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

    def made_up_requests(self, most: int, blocks: int) -> int:
        """Return the requests of a made-up step, up to `most`. They may share blocks of KV, and no
        state: vLLM's kernel for gated delta nets ends the process where a step has more of them
        than blocks.
        """
        return max(1, min(most, self.most_requests(blocks))) if self.state_blocks else most

    def in_words(self) -> str:
        """Return which blocks a request has whatever its length; "" if it has none."""
        own = f"a request has {self.fixed_blocks} for its state, and at least one for its KV"
        return own if self.fixed_blocks else ""


def one_group(block_tokens: int) -> KVGroups:
    """Return the groups of a model of attention alone."""
    return KVGroups((KVGroup(block_tokens),))
