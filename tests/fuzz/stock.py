"""Where stock vLLM 0.32.0 answers with 5xx too: `python -m tests.fuzz.run --stock` has compared them."""

from __future__ import annotations

import re

KNOWN: tuple[tuple[str, str], ...] = ()


def fails_in_stock(status: int, text: str) -> str | None:
    """Why stock vLLM gives such an answer as well, or None."""
    return next((reason for pattern, reason in KNOWN if re.search(pattern, f"{status} {text}")), None)
