"""An operator's order of a layout: the parser of its body, and its errors in the form of vLLM's."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

from flying_serving.config import MAX_ENGINES, MODES
from flying_serving.errors import LayoutError
from flying_serving.validation import first_problem

MAX_SHOWN = 400
"""The most characters of a name, a value or a reason that an answer repeats."""
_GROUP: JsonDict = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_ENGINES - 1},
}
_GROUPS: JsonDict = {"type": "array", "items": _GROUP}


class LayoutOrder(BaseModel):
    """Body of `POST /flying/layout`; the client checks `groups` and `mode`."""

    model_config = ConfigDict(extra="forbid")

    groups: Any = Field(default=None, examples=[[[0, 1], [2], [3]]], json_schema_extra=_GROUPS)
    mode: Any = Field(default="weave", json_schema_extra={"enum": list(MODES)})
    weave_steps: int | None = Field(default=None, ge=1, le=1000)

    @classmethod
    def parse(cls, body: object) -> LayoutOrder:
        """Parse a body. Raises LayoutError, naming field, value and the allowed values, if it is no
        order.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            field, value, allowed = first_problem(cls, error)
            raise LayoutError(field or "body", value, allowed) from None


def refusal_of(error: LayoutError) -> dict[str, object]:
    """Return the error in vLLM's form, with three more fields."""
    field, allowed = _shown(error.field), _shown(error.allowed)
    message = f"{field}={_shown(repr(error.value))}: {allowed}"
    problem = {"field": field, "value": _as_json(error.value), "allowed": allowed}
    return {"message": message, "type": "BadRequestError", "param": field, "code": 400, **problem}


def _shown(text: str) -> str:
    """Return a text without its middle if it is long."""
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def _as_json(value: object) -> object:
    """Return a value as it is if it is short and JSON has it, and otherwise its text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return _shown(repr(value))
    return value if len(text) <= MAX_SHOWN else _shown(repr(value))
