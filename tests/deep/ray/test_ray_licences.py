"""The page of licences is up to date, where Ray and the tools of the site are installed too: `make
test-ray`.
"""

from supply.licences import PAGE, page
from supply.pins import ALL_LOCKS


def test_the_page_is_up_to_date() -> None:
    """`make licences` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page(ALL_LOCKS)
