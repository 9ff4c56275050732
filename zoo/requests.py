"""What every model is asked: prompts shorter and longer than a block, in one batch, then one with a
known prefix.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from zoo.architectures import VOCAB

TOP = 5
"""Likeliest tokens that are compared at each step, beside the one drawn."""


@dataclass(frozen=True)
class Request:
    """One request: what is asked, over token ids."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams, and fields of a completion."""
        return {
            "temperature": 1.0,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "logprobs": TOP,
        }


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(count))


LONG = _tokens(4, 300)
BATCH = (
    Request("short", _tokens(1, 5), 12, 11),
    Request("block", _tokens(2, 60), 16, 12),
    Request("blocks", _tokens(3, 100), 12, 13),
    Request("chunks", LONG, 12, 14),
)
"""Sent together; few tokens each, for what shows in one step shows in a dozen. The second decodes
into a new block.
"""
AFTER = (Request("prefix", LONG[:200] + _tokens(5, 50), 8, 15),)
"""Sent when the others have ended, so that the prefix cache has what they share."""
