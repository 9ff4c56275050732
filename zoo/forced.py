"""Requests whose tokens are forced: all models answer the same text, and only logprobs differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from zoo.architectures import VOCAB
from zoo.requests import AFTER, BATCH, Request

PROCESSOR = "harness.force:ForceTokens"
"""The logits processor that forces them, in our server and in stock vLLM."""


@dataclass(frozen=True)
class Forced(Request):
    """A request that answers with random tokens, the same ones each time."""

    def sampling(self) -> dict[str, Any]:
        """See `Request.sampling`."""
        draw = random.Random(self.seed)
        tokens = [draw.randrange(VOCAB) for _ in range(self.max_tokens)]
        return super().sampling() | {"extra_args": {"force_token_ids": tokens}}


def _forced(requests: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(
        Forced(**{field.name: getattr(request, field.name) for field in fields(request)})
        for request in requests
    )


FORCED_BATCH, FORCED_AFTER = _forced(BATCH), _forced(AFTER)
"""Of `zoo.requests`."""
