"""Tables of the experiments: verdicts, and a reason below for each number that differs much."""

from __future__ import annotations

import pytest

from experiments import reasons
from experiments.common import Row, number, table
from experiments.reasons import why


@pytest.mark.parametrize(
    ("paper", "ours", "higher", "verdict"),
    [
        (2.0, 3.0, True, "better"),
        (2.0, 3.0, False, "**worse**"),
        (2.0, 1.0, True, "**worse**"),
        (2.0, 1.0, False, "better"),
        (2.0, 2.004, False, "equal"),
        (2.0, 3.0, None, ""),
        (None, 3.0, True, ""),
    ],
)
def test_verdicts(paper: float | None, ours: float, higher: bool | None, verdict: str) -> None:
    """Better is in the direction that the row says; without a published number there is none."""
    assert Row("x", paper, ours, higher).verdict == verdict


def test_only_what_differs_much_needs_a_reason() -> None:
    """A fifth is allowed; beyond it the reason stands below, or that there is none."""
    lines = table([Row("near", 10.0, 11.9), Row("far", 10.0, 12.1, why="because"), Row("open", 10.0, 7.9)])
    assert "| near | 10 | 11.9 | 1.19 |  |" in lines
    assert [line for line in lines if line.startswith("- ")] == ["- far: because", "- open: **not explained yet**"]


def test_a_reason_for_another_number_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are found for a value; when ours has moved away from it, the text names that value."""
    monkeypatch.setitem(reasons.REASONS, ("t", "m", "x"), (2.0, "slow links"))
    same, moved, other = why("t", "m", [Row("x", 1.0, 2.1), Row("x", 1.0, 3.0), Row("y", 1.0, 3.0)])
    assert (same.why, moved.why, other.why) == ("slow links", "(found when ours was 2) slow links", "")


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (0.12345, "0.123"), (-2000.0, "-2,000")])
def test_numbers(value: float, text: str) -> None:
    """Three digits."""
    assert number(value) == text
