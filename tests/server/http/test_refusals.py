"""How refusals are shown where vLLM shows none, or too much: streams of /v1/responses, and the
log.
"""

import json
import logging
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from flying_serving.server.http.refusals import ended_by_event, without_traceback

WRONG = VLLMValidationError(
    "vllm_xargs.tp_degree=3: must be one of [1, 2]", parameter="vllm_xargs.tp_degree"
)
TIMED_OUT = GracefulHTTPError("it waited too long", HTTPStatus.GATEWAY_TIMEOUT)


async def stream(error: Exception | None) -> AsyncIterator[str]:
    """Yield two events, then raise."""
    yield "event: a\ndata: {}\n\n"
    yield "event: b\ndata: {}\n\n"
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (WRONG, "400", "vllm_xargs.tp_degree"),
        (TIMED_OUT, "504", None),
        (RuntimeError("it is broken"), "500", None),
    ],
    ids=["wrong", "late", "broken"],
)
async def test_a_stream_that_fails_ends_with_an_event(
    error: Exception, code: str, param: str | None
) -> None:
    events = [event async for event in ended_by_event(stream(error))]
    assert len(events) == 3
    name, data, end = events[2].split("\n", 2)
    assert name == "event: error"
    assert end == "\n\n"[:1]
    said: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert said["message"]
    assert said == {
        "type": "error",
        "code": code,
        "message": said["message"],
        "param": param,
        "sequence_number": 2,
    }


async def test_a_stream_that_does_not_fail_is_left_as_it_is() -> None:
    assert [event async for event in ended_by_event(stream(None))] == [
        event async for event in stream(None)
    ]


def record(error: Exception) -> logging.LogRecord:
    """What `logger.exception("failed: %s", error)` makes."""
    try:
        raise error
    except type(error):
        return logging.LogRecord("vllm", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())


@pytest.mark.parametrize("error", [WRONG, TIMED_OUT], ids=["wrong", "late"])
def test_wrong_request_is_logged_on_one_line(error: Exception) -> None:
    """With the reason."""
    found = record(error)
    assert without_traceback(found)
    assert logging.Formatter("%(message)s").format(found) == f"failed ({error})"


def test_server_error_is_logged_with_its_traceback() -> None:
    found = record(ValueError("a bug"))
    assert without_traceback(found)
    assert "Traceback" in logging.Formatter().format(found)
