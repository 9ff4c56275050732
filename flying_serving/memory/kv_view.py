"""A lane's KV cache, token by token (torch, no vLLM)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flying_serving.layout.shards import Segment

Run = tuple[list[int], range]
"""A request's physical blocks in some lane, and which of its tokens are meant."""


def heads_of(rank: int, degree: int, kv_heads: int) -> range:
    """The model's KV heads that a rank of a lane has; ranks beyond their number share one."""
    return Segment(kv_heads, kv_heads).units_of(rank, degree)


@dataclass(frozen=True)
class KVView:
    """The KV cache of a lane on one device.

    A token's place is the number of its physical block times the lane's tokens in a block, and its place in the block:
    vLLM's slot mapping, which holds even if kernels see smaller blocks.

    `parts`: for each layer one tensor or more `[blocks, heads, tokens in a block, size]`, views of the KV memory.
    `heads`: which of the model's KV heads those are.
    """

    parts: Sequence[torch.Tensor]
    heads: range
    block_tokens: int

    @property
    def like(self) -> torch.Tensor:
        """Some part: size, dtype and device are those of all."""
        return self.parts[0]

    def slot_mapping(self, runs: Sequence[Run]) -> torch.Tensor:
        """The places of the tokens of runs, one after the other."""
        found = [torch.empty(0, dtype=torch.long)]
        for blocks, tokens in runs:
            position = torch.arange(tokens.start, tokens.stop)
            block = torch.tensor(blocks, dtype=torch.long)[position // self.block_tokens]
            found.append(block * self.block_tokens + position % self.block_tokens)
        return torch.cat(found).to(self.like.device)

    def read(self, part: int, places: torch.Tensor) -> torch.Tensor:
        """What one part has of some tokens, `[tokens, heads, size]`."""
        cache = self.parts[part]
        return cache[places // cache.shape[2], :, places % cache.shape[2]]

    def write(self, part: int, places: torch.Tensor, heads: range, values: torch.Tensor) -> None:
        """Keep the heads of this lane of `values`, `[tokens, heads, size]`, which are of the model's `heads`."""
        first, last = max(heads.start, self.heads.start), min(heads.stop, self.heads.stop)
        if first < last:
            cache = self.parts[part][:, first - self.heads.start : last - self.heads.start]
            mine = values[:, first - heads.start : last - heads.start]
            cache[places // cache.shape[2], :, places % cache.shape[2]] = mine
