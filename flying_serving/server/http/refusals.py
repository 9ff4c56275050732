"""Refusals where vLLM has none for a client: in streams of /v1/responses, and of bodies that are
nested too deeply. Refusals without the traceback in the log.
"""

import json
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from flying_serving.log import logger
from flying_serving.server.http.error_body import refusal_response

_TOO_DEEP = "body: is nested too deeply"


async def ended_by_event(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events of a stream of /v1/responses. An exception becomes its last event, `error`,
    as with OpenAI.

    vLLM raises the exception after HTTP 200: the connection breaks, without a message for the
    client.
    """
    number = 0
    try:
        async for event in events:
            number += 1
            yield event
    except Exception as error:
        cause = VLLMValidationError(_TOO_DEEP) if _is_too_deep(error) else error
        if not isinstance(cause, VLLMError):
            logger.exception("a stream of /v1/responses has failed")
        refusal = create_error_response(cause).error
        said = {"code": str(int(refusal.code)), "message": refusal.message, "param": refusal.param}
        yield (
            "event: error\ndata: "
            f"{json.dumps({'type': 'error', **said, 'sequence_number': number})}\n\n"
        )


def _is_too_deep(error: Exception) -> bool:
    """Return whether an error says that a value is nested too deeply. pydantic takes what is deeper
    than it follows for a circle.
    """
    return isinstance(error, RecursionError) or (
        isinstance(error, ValueError) and "Circular reference" in str(error)
    )


def without_traceback(record: logging.LogRecord) -> bool:
    """Filter vLLM's log: a client's error, or a request that it may try again, is one line. Some
    routes of vLLM log more.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, VLLMValidationError | GracefulHTTPError):
        record.exc_info = record.exc_text = None
        record.msg, record.args = f"{record.getMessage()} ({error})".replace("\n", " "), ()
    return True


async def refuse_depth(_: Request, __: Exception) -> JSONResponse:
    """Answer 400 to a body that JSON's parser has read, but that overflows the stack in a check of
    vLLM, which makes several calls for each level.
    """
    return refusal_response(HTTPException(HTTPStatus.BAD_REQUEST, _TOO_DEEP))


def attach(app: FastAPI) -> None:
    """Add the handler to the application, and the filter to the handlers of vLLM's log."""
    app.exception_handler(RecursionError)(refuse_depth)
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(without_traceback)
