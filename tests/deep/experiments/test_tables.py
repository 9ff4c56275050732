"""Tables of the experiments: verdicts, and a reason below for each number that is worse or differs
much.
"""

import pytest

from experiments import reasons
from experiments.common import Kept
from experiments.reasons import why
from experiments.rows import (
    OF_REASONS,
    Row,
    by_construction,
    number,
    one_layout,
    row,
    spread,
    table,
)


@pytest.mark.parametrize(
    ("paper", "ours", "higher", "verdict"),
    [
        (2.0, (3.0,), True, "better"),
        (2.0, (3.0,), False, "**worse**"),
        (2.0, (1.0,), True, "**worse**"),
        (2.0, (1.0,), False, "better"),
        (2.0, (2.004,), False, "equal"),
        (2.0, (3.0,), None, ""),
        (None, (3.0,), True, ""),
        (2.0, (2.5, 3.0, 3.5), True, "better"),
        (2.0, (1.9, 3.0, 3.5), True, "seeds differ"),
        (2.0, (2.0, 3.0, 3.5), True, "seeds differ"),
        ((1.8, 1.9), (1.85,), True, "equal"),
        ((1.8, 1.9), (1.7,), True, "**worse**"),
        ((1.8, 1.9), (2.0,), True, "better"),
    ],
)
def test_verdicts(
    paper: float | tuple[float, float] | None,
    ours: tuple[float, ...],
    higher: bool | None,
    verdict: str,
) -> None:
    """Better is in the direction that the row says, with every seed; without a published number
    there is none.
    """
    assert Row("x", paper, ours, higher).verdict == verdict


def test_worse_or_distant_figure_needs_a_reason() -> None:
    """A fifth is allowed where it is not worse; else the reason stands below, or that there is
    none.
    """
    lines = table(
        [
            Row("near", 10.0, (11.9,)),
            Row("far", 10.0, (12.1,), why="because"),
            Row("open", 10.0, (7.9,)),
            Row("worse", 10.0, (9.9,), True),
        ]
    )
    assert "| near | 10 | 11.9 | 1.19 |  |  |" in lines
    found = [line for line in lines if line.startswith("- ")]
    assert found == [
        "- far: because",
        "- open: **not explained yet**",
        "- worse: **not explained yet**",
    ]
    assert OF_REASONS in " ".join(lines[: lines.index(found[0])])


def test_row_by_construction_is_marked_and_explained() -> None:
    lines = table([Row(name, 1.0, (1.0,), True, by_construction("a formula")) for name in "ab"])
    assert "| a | 1 | 1 | 1.00 | equal | by construction |" in lines
    assert [line for line in lines if line.startswith("- ")] == ["- a formula"]


def test_rows_of_one_layout_have_their_own_list() -> None:
    known = (by_construction("a formula"), one_layout("as stock TP"))
    lines = table([Row(one.text, 1.0, (1.0,), True, one) for one in known])
    assert lines.index("- as stock TP") == lines.index(known[1].title) + 2
    assert lines.index("- a formula") == lines.index(known[0].title) + 2


@pytest.mark.parametrize(
    ("ours", "kernels", "reverses"),
    [((0.9, 1.5), 0.8, False), ((0.9, 1.5), 1.1, True), ((0.9,), None, False)],
)
def test_a_number_is_reversed_if_the_first_seed_has_another_verdict(
    ours: tuple[float, ...], kernels: float | None, reverses: bool
) -> None:
    assert Row("x", 1.0, ours, False, kernels=kernels).reverses == reverses


def test_a_published_number_of_another_source_names_it() -> None:
    assert (
        table([Row("a", 1.0, (1.0,))], "release")[0]
        == "| number | release | ours | ours / release |  | known before |"
    )


def test_a_reason_for_another_number_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are found for a value; when ours has moved away from it, the text names that
    value.
    """
    monkeypatch.setitem(reasons.REASONS, ("t", "m", "x"), (2.0, "slow links"))
    rows = [Row("x", 1.0, (2.0, 2.2)), Row("x", 1.0, (3.0,)), Row("y", 1.0, (3.0,))]
    same, changed, other = why("t", "m", rows)
    assert same.why == "slow links"
    assert changed.why == "(found when ours was 2) slow links"
    assert other.why == ""


def test_a_row_has_the_value_of_each_seed() -> None:
    found = Kept("abcdef0", [{"x": 1.0}, {"x": 3.0}], {"x": 7.0})
    one = row("x", 4.0, found, lambda numbers: numbers["x"])
    assert one.ours == (1.0, 3.0)
    assert one.mean == 2.0
    assert one.ratio == 0.5
    assert one.kernels == 7.0


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (0.12345, "0.123"), (-2000.0, "-2,000")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_spread() -> None:
    assert spread([2.0]) == "2"
    assert spread([2.0, 2.0]) == "2"
    assert spread([1.0, 2.0, 6.0]) == "3 [1..6]"
