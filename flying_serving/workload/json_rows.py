"""Rows of JSONL files decoded by type; what does not fit is an error with its line, column and value."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from flying_serving.errors import WorkloadError
from flying_serving.workload.lines import located

T = TypeVar("T")
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"field `(?P<field>[^`]*)`")


def decode_row(decoder: msgspec.json.Decoder[T], text: str, file: str, line: int) -> T:
    """One line as the decoder's type.

    Raises:
        WorkloadError: with file, line, column and value.
    """
    with located(file, line):
        try:
            return decoder.decode(text)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, WorkloadError):
                raise error.__cause__ from None
            column, allowed = _problem(str(error))
            raise WorkloadError(column, _value(text, column), allowed) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise WorkloadError("row", text, f"one JSON object ({error})") from None


def _problem(message: str) -> tuple[str, str]:
    """The column that msgspec complains about, and what it says."""
    place, missing = _PLACE.search(message), _FIELD.search(message)
    if missing is not None:
        return missing["field"], message
    if place is None:
        return "row", message
    return re.split(r"[.\[]", place["path"])[0] or "row", message[: place.start()]


def _value(text: str, column: str) -> Any:
    """What a row has in a column."""
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if isinstance(row, dict):
        return row.get(column) if column != "row" else row
    return row
