"""Errors of pydantic in our words."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flying_serving.validation import first_problem


class Example(BaseModel):
    """Kinds of fields that FlyingConfig may get."""

    model_config = ConfigDict(extra="forbid")

    below: float = Field(default=0, lt=3)
    whole: int | None = Field(default=None, gt=2)
    numbers: list[float] = []
    name: str = ""


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"below": 3}, ("below", 3, "must be a number below 3")),
        ({"whole": 2}, ("whole", 2, "must be a whole number above 2")),
        ({"whole": "x"}, ("whole", "x", "must be a whole number above 2")),
        ({"numbers": [1, "x"]}, ("numbers[1]", "x", "must be a number")),
        ({"name": 3}, ("name", 3, "Input should be a valid string")),
        ({"nam": 3}, ("nam", 3, "unknown; known are below, whole, numbers, name")),
        (5, ("", 5, "must be a JSON object")),
    ],
)
def test_problems_in_plain_english(raw: Any, problem: tuple[str, object, str]) -> None:
    """What has no argv of ours keeps pydantic's."""
    with pytest.raises(ValidationError) as wrong:
        Example.model_validate(raw)
    assert first_problem(Example, wrong.value) == problem
