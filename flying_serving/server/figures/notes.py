"""What `GET /flying/status` and `GET /flying/view` answer of single engines, as text: for the
command line.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

NOTED_BYTES = {"lent_bytes": "lent"}
"""Parts of an engine's memory that are shown where there are any, each with its word."""


class Problem(NamedTuple):
    """An engine that does not serve. `state`: in a word. `since`: as `time`."""

    engine: int
    state: str
    since: float
    text: str


def problems(answer: Mapping[str, Any]) -> list[Problem]:
    """Return the engines that do not serve, each with why and how often, and the problem of its
    last start.
    """
    return [
        Problem(one["engine"], "lost", one["since"], _text_of_loss(one)) for one in answer["lost"]
    ]


def _text_of_loss(one: Mapping[str, Any]) -> str:
    often = f" ({one['losses']} losses so far)" if one["losses"] > 1 else ""
    start = f"; last start: {one['start_problem']}" if one["start_problem"] else ""
    return f"engine {one['engine']} is lost: {one['why']}{often}{start}"
