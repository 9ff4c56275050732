"""docs/models.md is what its rows give."""

from zoo import kept


def test_the_page_is_of_the_rows_that_are_kept() -> None:
    """`python -m zoo --page` writes it."""
    assert kept.PAGE.read_text(encoding="utf-8") == kept.kept_page()
