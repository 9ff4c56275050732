"""The comparison of a group's host time with stock's: flags, figures and lines."""

import pytest

from benchmarks.group_host import FIGURES, compare, degrees_held, flags_of, lines, tenth
from benchmarks.group_stamps import Found


def found(gap_s: float, count: int = 200) -> Found:
    return Found([gap_s] * count, [2 * gap_s] * count, gap_s / 2, gap_s / 4)


def test_a_degree_needs_a_core_for_each_member() -> None:
    assert degrees_held([2, 4], 2) == [2]
    assert degrees_held([2, 4], 4) == [2, 4]


@pytest.mark.parametrize("scheduling", ["async", "in order"])
def test_both_systems_have_the_same_flags_but_for_the_degree(scheduling: str) -> None:
    ours, stock = (set(flags_of(4, scheduling, of)) for of in (True, False))
    assert ours - stock == {"--data-parallel-size=4", "--policy=manual"}
    assert stock - ours == {"--tensor-parallel-size=4"}
    assert [flag for flag in ours if "max-num-seqs" in flag] == ["--max-num-seqs=256"]


def test_ratios_are_of_one_round() -> None:
    beside = compare(
        [found(3.0), found(8.0)], [found(1.0), found(4.0)], FIGURES["scheduler's work"]
    )
    assert beside.ratios == [3.0, 2.0]
    assert beside.ours == [1.5, 4.0]


def test_a_percentile_lies_between_values() -> None:
    assert tenth([float(value) for value in range(11)]) == 1.0


def test_the_table_has_each_figure_and_says_when_steps_are_too_few() -> None:
    full = lines("cell", [found(3e-6)], [found(1e-6)])
    assert len(full) == 1 + len(FIGURES)
    assert full[1] == "  gap, median               ours 3 [3..3], stock 1 [1..1], ratio 3 [3..3]"
    assert "FEWER" not in full[0]
    assert "FEWER" in lines("cell", [found(1.0, 199)], [found(1.0)])[0]
