"""Errors of pydantic as the field, its value and what is allowed, without the names of pydantic's
types.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_BOUNDS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}
_NUMBERS = ("int_", "float_", "finite_", "greater_", "less_")


def first_problem(model: type[BaseModel], error: ValidationError) -> tuple[str, object, str]:
    """Return the first wrong field of a model (`group_sizes[1]`; "" for all of it), its value and
    the allowed values.
    """
    problem = error.errors()[0]
    field = ""
    for part in problem["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f"{'.' if field else ''}{part}"
    return field, problem["input"], _allowed(model, problem)


def _allowed(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    kind, place = problem["type"], problem["loc"]
    if kind == "extra_forbidden":
        return f"unknown; known are {', '.join(model.model_fields)}"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "literal_error":
        return f"must be {problem['ctx']['expected']}"
    if kind == "tuple_type":
        return "must be a list"
    if not place:
        return "must be a JSON object"
    if kind.startswith(_NUMBERS):
        whole = kind.startswith("int_")
        if len(place) > 1:
            return f"must be {_number(whole)}"
        return f"must be {allowed_range(model.model_fields[place[0]], whole=whole)}"
    return str(problem["msg"])


def allowed_range(field: FieldInfo, *, whole: bool = False) -> str:
    """Return `a whole number from 1 up to 1000`, by the type and bounds of a field.

    `whole`: whole numbers, whatever the type says.
    """
    whole = whole or int in (field.annotation, *get_args(field.annotation))
    pairs = [
        (word, getattr(rule, name, None))
        for rule in field.metadata
        for name, word in _BOUNDS.items()
    ]
    return " ".join(
        [_number(whole), *(f"{word} {bound}" for word, bound in pairs if bound is not None)]
    )


def _number(whole: bool) -> str:
    return "a whole number" if whole else "a number"
