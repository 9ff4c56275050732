"""What a family that writes its own tensors is given, and what it gives."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, as in `checkpoint.Shape`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    std: float


class Drawn(NamedTuple):
    """A tensor of the checkpoint, and the numbers that it is drawn of."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
