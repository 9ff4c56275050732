"""The comparison of a group's host time with stock's: flags, figures and lines."""

from benchmarks.group_host import FIGURES, compare, degrees_held, lines, tenth
from benchmarks.group_steps import Found


def found(gap_s: float, count: int = 200) -> Found:
    return Found([gap_s] * count, [2 * gap_s] * count, gap_s / 2, gap_s / 8, gap_s / 4)


def test_a_degree_needs_a_core_for_each_member() -> None:
    assert degrees_held([2, 4], 2) == [2]
    assert degrees_held([2, 4], 4) == [2, 4]


def test_ratios_are_of_one_round() -> None:
    beside = compare(
        [found(3.0), found(8.0)], [found(1.0), found(4.0)], FIGURES["scheduler's work"]
    )
    assert beside.ratios == [3.0, 2.0]
    assert beside.ours == [1.5, 4.0]
    assert beside.more_s == [1.0, 2.0]


def test_a_percentile_lies_between_values() -> None:
    assert tenth([float(value) for value in range(11)]) == 1.0


def test_the_table_has_each_figure_and_says_when_steps_are_too_few() -> None:
    full = lines("cell", [found(3e-6)], [found(1e-6)])
    assert len(full) == 1 + len(FIGURES)
    values = "ours 3 [3..3], stock 1 [1..1], more 2 [2..2], ratio 3 [3..3]"
    assert full[1] == f"  gap, mean                 {values}"
    assert "FEWER" not in full[0]
    assert "FEWER" in lines("cell", [found(1.0, 199)], [found(1.0)])[0]


def test_without_a_gap_of_stocks_there_is_no_ratio() -> None:
    assert lines("cell", [found(3e-6)], [found(0.0)])[1].endswith("more 3 [3..3], ratio -")
