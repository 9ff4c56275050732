"""What is wrong with a figure beside its budget."""

from typing import Any

import pytest

from house.budgets import Figure, with_budgets
from house.walks import NEEDED_STATEMENTS, File, Record

BUDGET = {"statements": 100, "rooms": 4, "walk": 20}


def problem(kind: str, now: int, budget: int, present: int | None) -> str | None:
    return Figure(kind, "it", now, budget, present).problem()


@pytest.mark.parametrize(
    ("now", "present", "says"),
    [
        (4, None, None),
        (5, None, "at most 4"),
        (6, 6, None),
        (7, 6, "more than the present 6"),
        (5, 6, "lower its line"),
        (4, 6, "take its line"),
        (4, 4, "take its line"),
    ],
)
def test_a_present_figure_only_goes_down(now: int, present: int | None, says: str | None) -> None:
    found = problem("rooms", now, 4, present)
    assert found is None if says is None else says in str(found)


def test_a_few_statements_less_are_no_reason_to_lower_the_figure() -> None:
    assert problem("statements", 19_950, 18_000, 20_000) is None
    assert "lower" in str(problem("statements", 19_800, 18_000, 20_000))
    assert "more than" in str(problem("statements", 20_001, 18_000, 20_000))


def figures(present: dict[str, Any]) -> list[Figure]:
    files = (File("a.py", ("f",), NEEDED_STATEMENTS), File("b.py", ("g",), 1))
    table = {"budget": BUDGET, "present": present}
    return with_budgets(120, {"lamps": 6, "doors": 2}, {"out": Record(files, ())}, table)


def test_each_figure_has_its_budget_and_its_line() -> None:
    assert figures({"statements": 130, "rooms": {"lamps": 7}}) == [
        Figure("statements", "flying_serving", 120, 100, 130),
        Figure("rooms", "lamps", 6, 4, 7),
        Figure("rooms", "doors", 2, 4, None),
        Figure("walk", "out", 1, 20, None),
    ]


def test_a_line_without_a_figure_is_an_error() -> None:
    with pytest.raises(ValueError, match="windows"):
        figures({"rooms": {"windows": 5}})
