"""How many tokens each group size can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flying_serving.layout.shards import lane_block_tokens


@dataclass(frozen=True)
class Capacity:
    """KV tokens by group size, and the limit of the model.

    Args:
        tokens: group size -> tokens that the pooled KV of such a group holds.
        devices: devices per engine, to speak in degrees.
    """

    tokens: Mapping[int, int]
    devices: int

    @classmethod
    def of(cls, sizes: Sequence[int], blocks: int, block_tokens: int, devices: int, kv_heads: int) -> Capacity:
        """From the blocks of the engine that has fewest; one block of each is vLLM's null block."""
        usable = blocks - 1
        tokens = {s: usable * lane_block_tokens(block_tokens, s, devices, kv_heads) for s in sizes}
        return cls(tokens, devices)

    def fitting_sizes(self, needed_tokens: int) -> list[int]:
        """Group sizes that hold a number of tokens, narrow first."""
        return [size for size in sorted(self.tokens) if self.tokens[size] >= needed_tokens]

    def degree(self, size: int) -> int:
        """TP degree of a group of `size` engines."""
        return size * self.devices

    @property
    def degrees(self) -> list[int]:
        """Every degree that may be asked for."""
        return [self.degree(size) for size in sorted(self.tokens)]
