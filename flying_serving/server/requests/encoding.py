"""Refusals of requests that cannot be encoded for an engine, before anything is booked. They name
the wrong field.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

_CANNOT = (TypeError, ValueError, OverflowError, RecursionError)
_CONNECTOR_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Keys of `extra_args` that vLLM's routes fill from fields of their own; the rest of it is
`vllm_xargs`.
"""


def shown(value: object) -> str:
    """Return a client's value in a few words of ASCII. No answer may be able to repeat the
    original.
    """
    return _in_ascii(reprlib.repr(value))


def refused(field: str, value: object, allowed: str) -> VLLMValidationError:
    """Return the refusal (HTTP 400) of a wrong value, naming field, value and allowed values."""
    return VLLMValidationError(f"{field}={shown(value)}: {allowed}", parameter=field)


def check_encodable(fields: Mapping[str, Any], encode: Callable[[Any], object]) -> None:
    """Check that the fields of a request, by name, can be sent to an engine, and copied by vLLM
    before.

    `encode`: the encoder of its messages.

    Raises:
        VLLMValidationError: naming field, value and the allowed values (HTTP 400).
    """
    try:
        encode(tuple(fields.values()))
        if fields["sampling_params"] is not None:
            fields["sampling_params"].clone()  # as vLLM will, with several calls for each level
    except _CANNOT as error:
        name, value, problem = _first_problem(fields, encode) or ("request", None, error)
        raise refused(_in_ascii(name), value, _allowed(problem)) from None


def _first_problem(
    fields: Mapping[str, Any], encode: Callable[[Any], object]
) -> tuple[str, Any, Exception] | None:
    for name, value in _named(fields):
        try:
            encode({name: value})
            deepcopy(value)
        except _CANNOT as error:
            return name, value, error
    return None


def _named(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every field with the name that clients know it by."""
    for name, value in fields.items():
        if not isinstance(value, SamplingParams):
            yield name, value
            continue
        for key in value.__struct_fields__:
            if key != "extra_args":
                yield key, getattr(value, key)
        for key, extra in (value.extra_args or {}).items():
            yield key if key in _CONNECTOR_FIELDS else f"vllm_xargs.{key}", extra


def _allowed(problem: Exception) -> str:
    match problem:
        case UnicodeEncodeError():
            return "must be text that can be encoded as UTF-8, without lone surrogates"
        case OverflowError():
            return "whole numbers must be from -2**63 up to 2**64 - 1"
        case RecursionError():
            return "is nested too deeply"
    return _in_ascii(str(problem))


def _in_ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
