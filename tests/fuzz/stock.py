"""Where stock vLLM 0.32.0 answers with 5xx too: `python -m tests.fuzz.run --stock` has compared them."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"^500 .*'(list|int|float|str|bool)' object has no attribute 'get'",
        "structured_outputs is no object: vLLM's validator asks it for its fields before pydantic has looked at it",
    ),
    (
        r'^500 \{"error":\{"message":"",',
        "parameters of /inference/v1/generate nested too deeply: vLLM's check of them lets RecursionError through",
    ),
)
"""What such an answer looks like, with its status before it, and why vLLM gives it."""


def fails_in_stock(status: int, text: str) -> str | None:
    """Why stock vLLM gives such an answer as well, or None."""
    return next((reason for pattern, reason in KNOWN if re.search(pattern, f"{status} {text}")), None)
