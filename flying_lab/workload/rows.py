"""Rows of text files as a stream. An unreadable row is an error with its line, column and value,
never skipped.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flying_lab.errors import WorkloadError

MAX_LINE_BYTES = 2**26
BOM = b"\xef\xbb\xbf"
G = TypeVar("G")
T = TypeVar("T")
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"field `(?P<field>[^`]*)`")


@contextmanager
def located(file: str, line: int) -> Iterator[None]:
    """Name the file and the line in a WorkloadError of the body."""
    try:
        yield
    except WorkloadError as error:
        raise WorkloadError(error.field, error.value, error.allowed, file=file, line=line) from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text without its end) of each line. Blank lines may only be the last
    ones.

    Raises:
        WorkloadError: if the file cannot be opened, has no lines, a line is no UTF-8, longer than
            64 MiB, or blank before others.
    """
    file, blank, number = str(path), 0, 0
    try:
        with path.open("rb") as stream:
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                with located(file, number):
                    text = _text(raw, number)
                if not text:
                    blank = blank or number
                    continue
                if blank:
                    raise WorkloadError(
                        "line", "", "only the last lines may be blank", file=file, line=blank
                    )
                yield number, text
    except OSError as error:
        raise WorkloadError("file", file, error.strerror or str(error)) from None
    if number == 0 or blank == 1:
        raise WorkloadError("file", "", "the file is empty", file=file)


def _text(raw: bytes, number: int) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise WorkloadError("line", raw[:40], f"at most {MAX_LINE_BYTES} bytes")
    if number == 1:
        raw = raw.removeprefix(BOM)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        around = raw[max(0, error.start - 10) : error.start + 10]
        raise WorkloadError("line", around, "text in UTF-8") from None
    if "\0" in text:
        raise WorkloadError("line", text[:40], "text without NUL bytes")
    return text.strip()


def checked(decode: Callable[[G], T], given: G, file: str, line: int) -> T:
    """Decode one line of JSON, or cells by their columns, with msgspec.

    Raises:
        WorkloadError: with file, line, column and value.
    """
    with located(file, line):
        try:
            return decode(given)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, WorkloadError):
                raise error.__cause__ from None
            column, allowed = _problem(str(error))
            raise WorkloadError(
                _printable(column), _value(given, column), _printable(allowed)
            ) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise WorkloadError("row", given, f"one JSON object ({error})") from None


def _problem(message: str) -> tuple[str, str]:
    """Return the column that msgspec complains about, and its message."""
    place, missing = _PLACE.search(message), _FIELD.search(message)
    if missing is not None:
        return missing["field"], message
    if place is None:
        return "row", message
    return re.split(r"[.\[]", place["path"])[0] or "row", message[: place.start()]


def _printable(text: str) -> str:
    """Escape line ends and control characters, which a file may have in the name of a field."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _value(given: Any, column: str) -> Any:
    """Return the value of a row in a column."""
    try:
        row = msgspec.json.decode(given) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError):
        return given
    return row.get(column) if isinstance(row, dict) and column != "row" else row
