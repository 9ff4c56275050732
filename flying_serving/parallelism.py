"""What a group divides in a step: weights or tokens."""

from enum import Enum


class Parallelism(Enum):
    """What the members of a group divide in a step.

    Both keep KV by heads, so that a request may change from one to the other between steps.
    """

    TENSOR = "tensor"
    """The weights: each member computes all tokens with its shard of each weight, and two sums in
    each layer put them together.
    """
    TOKEN = "token"
    """The tokens: each member computes its share of them with all weights, and exchanges them for
    its heads before attention, and back after it (DeepSpeed-Ulysses, arXiv 2309.14509).
    """
