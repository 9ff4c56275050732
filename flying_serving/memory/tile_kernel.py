"""Tiles of KV that one Triton kernel gathers: all tiles, layers and heads of a stack in one launch.

Tested with Triton's interpreter only. It has not run on CUDA (docs/design/cuda.md).
"""

import numpy as np
import torch
import triton
import triton.language as tl

from flying_serving.memory.tiles import TileCopy, TileNumbers

ROWS = 16
"""Tokens that a program copies at once. It is fixed, so that one binary serves all lanes."""
HEADER = tl.constexpr(6)
"""Numbers of a table before its offsets."""
WORDS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["source", "target", "table"])
def _gather(source, target, table, ROWS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one tile of one piece, which is a layer's head. Program: (tile, piece); `table`: as of
    `table_of`.
    """
    tile, piece = tl.program_id(0), tl.program_id(1)
    tiles, pieces = tl.num_programs(0), tl.num_programs(1)
    tokens, words = tl.load(table), tl.load(table + 1)
    source_token, source_word = tl.load(table + 2), tl.load(table + 3)
    target_token, target_word = tl.load(table + 4), tl.load(table + 5)
    of_tile = table + HEADER + tile
    of_piece = table + HEADER + 2 * tiles + piece
    source += tl.load(of_tile) + tl.load(of_piece)
    target += tl.load(of_tile + tiles) + tl.load(of_piece + pieces)
    word = tl.arange(0, WORDS)[None, :]
    for first in range(0, tokens, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < tokens) & (word < words)
        values = tl.load(source + row * source_token + word * source_word, mask=inside)
        tl.store(target + row * target_token + word * target_word, values, mask=inside)


def copy_by_kernel(tiles: TileCopy) -> None:
    """Copy all tiles of a stack by one launch on the target's device, which must be able to read
    the source.
    """
    for pair in tiles.stacks:
        source, target = as_words(*pair)
        table = torch.from_numpy(table_of(source, target, tiles))
        grid = len(tiles.source_tiles), source.shape[0] * source.shape[2]
        words = 1 << (source.shape[4] - 1).bit_length()
        _gather[grid](source, target, table.to(target.device, non_blocking=True), ROWS, words)


def as_words(source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two stacks as integers: of eight bytes if the rows of both are made of such, otherwise
    of an element's size.
    """
    size_bytes = source.element_size()
    wide = all(_is_wide(stack) for stack in (source, target))
    word = torch.int64 if wide else WORDS_OF[size_bytes]
    return source.view(word), target.view(word)


def _is_wide(stack: torch.Tensor) -> bool:
    """Return whether a stack's rows are contiguous, and begin and end between words of eight
    bytes.
    """
    sizes = stack.shape[-1], stack.storage_offset(), *stack.stride()[:-1]
    return stack.stride(-1) == 1 and all(n * stack.element_size() % 8 == 0 for n in sizes)


def table_of(source: torch.Tensor, target: torch.Tensor, tiles: TileCopy) -> TileNumbers:
    """Return the numbers that the kernel reads, counted in elements of the stacks.

    Six come first: tokens of a tile, elements of a row, and the distances of tokens and elements in
    the source, then in the target. The offsets follow: of tiles in the source, of tiles
    in the target, of pieces in the source, of pieces in the target.
    """
    steps = (source.stride(3), source.stride(4), target.stride(3), target.stride(4))
    header = np.array([tiles.tile_tokens, source.shape[4], *steps], dtype=np.int64)
    offsets = (
        _tile_offsets(source, tiles.source_tiles, tiles.tile_tokens),
        _tile_offsets(target, tiles.target_tiles, tiles.tile_tokens),
        _piece_offsets(source),
        _piece_offsets(target),
    )
    return np.concatenate([header, *offsets])


def _tile_offsets(stack: torch.Tensor, numbers: TileNumbers, tile_tokens: int) -> TileNumbers:
    blocks, parts = np.divmod(numbers, stack.shape[3] // tile_tokens)
    offsets: TileNumbers = blocks * stack.stride(1) + parts * (tile_tokens * stack.stride(3))
    return offsets


def _piece_offsets(stack: torch.Tensor) -> TileNumbers:
    layers = np.arange(stack.shape[0], dtype=np.int64) * stack.stride(0)
    heads = np.arange(stack.shape[2], dtype=np.int64) * stack.stride(2)
    return np.add.outer(layers, heads).ravel()
