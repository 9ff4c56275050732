"""Where stock vLLM 0.32.0 answers with 5xx too, by `python -m tests.deep.fuzz.run --stock`."""

import re
from dataclasses import dataclass

from tests.deep.fuzz.drawing import Sent


@dataclass(frozen=True)
class Known:
    """A kind of 5xx that stock vLLM gives.

    Args:
        path: the route, as a pattern.
        sent: what the body of such a request holds.
        answer: what the answer begins with after its status, as a pattern.
        why: why vLLM gives it.
    """

    path: str
    sent: bytes
    answer: str
    why: str


KNOWN: tuple[Known, ...] = (
    Known(
        r"/v1/(chat/)?completions",
        b"structured_outputs",
        r"500 .*'(list|int|float|str|bool)' object has no attribute 'get'",
        "structured_outputs is no object: vLLM's validator asks it for its fields before "
        "pydantic has looked at it",
    ),
    Known(
        r"/v1/(chat/)?completions",
        b'"allowed_token_ids"',
        r'500 \{"error":\{"message":"Internal server '
        r'error","type":"InternalServerError","param":null,"code":500\}\}$',
        "allowed_token_ids has no token that response_format's grammar allows: vLLM ends the "
        "request with an error",
    ),
)


def fails_in_stock(sent: Sent, status: int, text: str) -> str | None:
    """Why stock vLLM gives such an answer as well, or None."""
    for known in KNOWN:
        asked = re.fullmatch(known.path, sent.path) and known.sent in sent.content
        if asked and re.match(known.answer, f"{status} {text}"):
            return known.why
    return None


LOGGED = r"AttributeError: '(list|int|float|str|bool)' object has no attribute 'get'$"
"""The first of the above: uvicorn logs it with the traceback."""


def logged_by_stock(error: str) -> bool:
    """Whether a traceback that ends with this line is stock vLLM's, of a kind of 5xx above."""
    return re.match(LOGGED, error) is not None
