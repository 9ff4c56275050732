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
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from flying_serving.server.http.refusals import ended_by_event, without_traceback
from flying_serving.server.patches import refuse_reload

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
        (RecursionError("maximum recursion depth exceeded"), "400", None),
        (ValueError("Circular reference detected (id repeated)"), "400", None),  # pydantic's
    ],
    ids=["wrong", "late", "broken", "deep", "deep for pydantic"],
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


@pytest.mark.parametrize(
    ("vllms", "in_place", "said"),
    [
        (None, False, None),
        (None, True, "load_inplace: cannot be served by Flying Serving yet"),
        ("vLLM's own refusal", True, "vLLM's own refusal"),
    ],
)
async def test_an_adapter_is_not_loaded_again_in_place(
    vllms: str | None, in_place: bool, said: str | None
) -> None:
    """Members of a group would compute with different weights of it."""
    request = LoadLoRAAdapterRequest(lora_name="a", lora_path="/a", load_inplace=in_place)

    async def check(_: object, __: object) -> ErrorResponse | None:
        return None if vllms is None else create_error_response(vllms)

    answer = await refuse_reload(check, None, request)
    assert (answer is None) is (said is None)
    if said is not None:
        assert answer.error.message.startswith(said)
        assert answer.error.code == HTTPStatus.BAD_REQUEST
