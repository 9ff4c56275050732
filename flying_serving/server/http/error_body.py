"""Refusals in the form of vLLM's errors, for answers that vLLM's handlers of errors do not make."""

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse


def error_body(message: str, status: HTTPStatus) -> dict[str, Any]:
    """Return the body that vLLM gives a `GracefulHTTPError`."""
    return {"error": {"message": message, "type": status.phrase, "param": None, "code": status}}


def refusal_response(error: HTTPException) -> JSONResponse:
    """Return the answer to a request that does not reach vLLM's application."""
    status = HTTPStatus(error.status_code)
    return JSONResponse(error_body(error.detail, status), status)
