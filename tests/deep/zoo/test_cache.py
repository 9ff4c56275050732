"""What a kept answer depends on: what the code does, and not how it is laid out."""

import json

import pytest

from tests.deep.zoo.ways import RECORDED, WAYS
from zoo.architectures import zoo
from zoo.cache import code_of, is_of

SOURCE = 'def f(a):\n    """Docs."""\n    return a + 1\n'


def test_docstrings_comments_and_layout_change_nothing() -> None:
    laid_out = 'def f(\n    a,\n):\n    """Other docs."""\n\n    # why\n    return a + 1\n'
    assert code_of(laid_out) == code_of(SOURCE)


def test_another_constant_is_other_code() -> None:
    assert code_of(SOURCE.replace("1", "2")) != code_of(SOURCE)


@pytest.mark.parametrize("name", WAYS)
def test_the_recorded_answers_are_of_the_model_as_it_is_now(name: str) -> None:
    model = next(model for model in zoo() if model.name == name)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert is_of(recorded[name], model), "python -m tests.deep.zoo.record"
