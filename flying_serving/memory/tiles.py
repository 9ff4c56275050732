"""Tiles of KV that are copied from one lane to another (torch, no vLLM).

A *tile* is the largest run of tokens of which both lanes' kernel blocks are made. A `TileCopy` says
for any device which tiles are copied; `copiers.py` chooses how.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TileNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TileCopy:
    """Tiles to copy between two lanes, at least one.

    `stacks`: pairs of a source and a target with the same heads, `[layers, blocks, heads, tokens in
    a block, size]` each. `source_tiles`, `target_tiles`: the tiles' numbers in all pairs, counted
    from the first tile of block 0. `tile_tokens`: tokens in a tile.
    """

    stacks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    source_tiles: TileNumbers
    target_tiles: TileNumbers
    tile_tokens: int


def tile_numbers(
    blocks: Sequence[int], block_tokens: int, tokens: range, tile_tokens: int
) -> TileNumbers:
    """Return the numbers of the tiles that hold some tokens of a request, at least one token.

    `blocks`: of the request from its first token on, each with `block_tokens`.
    """
    first, last = tokens.start // tile_tokens, (tokens.stop - 1) // tile_tokens
    tiles = np.arange(first, last + 1, dtype=np.int64)
    in_block = block_tokens // tile_tokens
    before = first // in_block
    block_of = np.asarray(blocks[before : last // in_block + 1], dtype=np.int64)
    numbers: TileNumbers = block_of[tiles // in_block - before] * in_block + tiles % in_block
    return numbers


def copy_by_loop(tiles: TileCopy) -> None:
    """Copy one tile of all layers and heads after the other."""
    numbers = list(zip(tiles.source_tiles.tolist(), tiles.target_tiles.tolist(), strict=True))
    for source, target in tiles.stacks:
        sources, targets = (stack.split(tiles.tile_tokens, dim=3) for stack in (source, target))
        for source_tile, target_tile in numbers:
            source_block, source_part = divmod(source_tile, len(sources))
            target_block, target_part = divmod(target_tile, len(targets))
            targets[target_part].select(1, target_block).copy_(
                sources[source_part].select(1, source_block), non_blocking=True
            )
