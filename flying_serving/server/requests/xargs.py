"""Fields of `vllm_xargs`. A refusal of a wrong value names its field, the value, and the allowed
values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from flying_serving.server.requests.encoding import refused
from flying_serving.vllm_adapter.keys import DEADLINE_KEY, OURS

DEGREE_KEY = "tp_degree"
EXPECTED_KEY = "expected_tokens"
SPLIT_KEY = "split_at"


def check_names(extra: Mapping[str, Any]) -> None:
    """Raise VLLMValidationError for a field that only the server may send to engines."""
    for key in OURS:
        if key in extra:
            raise VLLMValidationError(
                f"vllm_xargs.{key} is not for clients", parameter=f"vllm_xargs.{key}"
            )


def degree(extra: Mapping[str, Any], degrees: Sequence[int]) -> int | None:
    """Return the TP degree that a request asks for; whether there is such a group is checked
    later.
    """
    value = extra.get(DEGREE_KEY)
    if DEGREE_KEY not in extra or _is_whole(value):
        return value
    raise refused(f"vllm_xargs.{DEGREE_KEY}", value, f"must be one of {list(degrees)}")


def deadline_s(extra: Mapping[str, Any]) -> float | None:
    """Return the longest time in seconds that a request waits until a scheduler has it in a
    step.
    """
    value = extra.get(DEADLINE_KEY)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        says = "must be a number above 0 up to 86400"
        raise refused(f"vllm_xargs.{DEADLINE_KEY}", value, says)
    return float(value)


def tokens(extra: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    """Return a number of tokens from `least` to `most`."""
    if key not in extra:
        return None
    value = extra[key]
    if not _is_whole(value) or not least <= value <= most:
        says = f"must be a whole number from {least} to {most}"
        raise refused(f"vllm_xargs.{key}", value, says)
    return int(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
