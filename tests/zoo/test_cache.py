"""What a kept answer depends on: what the code does, and not how it is laid out."""

from zoo.cache import code_of

SOURCE = 'def f(a):\n    """Docs."""\n    return a + 1\n'


def test_docstrings_comments_and_layout_change_nothing() -> None:
    laid_out = 'def f(\n    a,\n):\n    """Other docs."""\n\n    # why\n    return a + 1\n'
    assert code_of(laid_out) == code_of(SOURCE)


def test_another_constant_is_other_code() -> None:
    assert code_of(SOURCE.replace("1", "2")) != code_of(SOURCE)
