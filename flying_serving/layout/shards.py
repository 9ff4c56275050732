"""The part of a weight or of the KV cache that a rank works on: arithmetic only.

A fused weight consists of *segments* (q, k, v; gate, up; or a single one). Each segment has a
number of *units*, the finest shards that any lane asks for. In a lane of degree p, rank r works on
a run of consecutive units of each segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flying_serving.errors import ConfigError


@dataclass(frozen=True)
class Segment:
    """One fused part of a weight: `size` rows (or columns) cut into `units` equal units."""

    size: int
    units: int

    def __post_init__(self) -> None:
        if self.units < 1 or self.size % self.units:
            raise ConfigError(f"segment of {self.size} cannot be cut into {self.units} equal units")

    @property
    def unit_size(self) -> int:
        """Rows (or columns) of one unit."""
        return self.size // self.units

    def units_of(self, rank: int, degree: int) -> range:
        """Return the units that `rank` of `degree` works on. Ranks beyond the number of units share
        one (replicated KV heads).
        """
        if self.units >= degree:
            per_rank = self.units // degree
            return range(rank * per_rank, (rank + 1) * per_rank)
        unit = rank * self.units // degree
        return range(unit, unit + 1)


def segments_of(
    sizes: Sequence[int], widest: int, heads: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """Return the segments of a fused weight, whose parts have `sizes` rows, for lanes up to degree
    `widest`.

    `heads`: how many each part has, if it may not be cut inside a head; fewer heads than `widest`
    replicate.
    """
    if heads is None:
        return tuple(Segment(size, widest) for size in sizes)
    return tuple(
        Segment(size, min(widest, count)) for size, count in zip(sizes, heads, strict=True)
    )


def lane_block_tokens(block_tokens: int, group_size: int, devices: int, kv_heads: int) -> int:
    """Return the tokens that a block of constant bytes holds in a lane (the paper's KV Cache
    Adaptor).

    `block_tokens`: its tokens in lane 1. A lane that cannot cut the model's `kv_heads` any further
    replicates them, and the block stays as it is.
    """
    heads_before = max(1, kv_heads // devices)
    heads_in_lane = max(1, kv_heads // (devices * group_size))
    return block_tokens * heads_before // heads_in_lane


def degree_obstacle(degree: int, attention_heads: int, kv_heads: int) -> str | None:
    """Return why a model with these heads cannot be split `degree` ways, or None."""
    if attention_heads % degree:
        return f"{attention_heads} attention heads do not divide by {degree}"
    if kv_heads >= degree and kv_heads % degree:
        return f"{kv_heads} KV heads do not divide by {degree}"
    if kv_heads < degree and degree % kv_heads:
        return f"{degree} ranks do not share {kv_heads} KV heads evenly"
    return None
