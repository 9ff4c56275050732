"""The comparison of a group's host time with stock's: flags, figures and lines."""

import pytest

from benchmarks.group_host import FIGURES, Cell, compare, degrees_held, lines, tenth
from benchmarks.group_stamps import Found


def found(gap_s: float, count: int = 200) -> Found:
    return Found([gap_s] * count, [2 * gap_s] * count, gap_s / 2, gap_s / 8, gap_s / 4)


def test_a_degree_needs_a_core_for_each_member() -> None:
    assert degrees_held([2, 4], 2) == [2]
    assert degrees_held([2, 4], 4) == [2, 4]


@pytest.fixture
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Return a cell whose model is not written."""
    monkeypatch.setattr("benchmarks.group_host.make_model", lambda path, _: path)
    monkeypatch.setattr(
        "benchmarks.group_host.server_flags",
        lambda devices, folder, stock: [
            str(folder / devices.model),
            f"--hardware={devices.hardware}",
        ],
    )
    return Cell(*request.param)


@pytest.mark.parametrize(
    "cell", [(4, "async"), (4, "in order"), (2, "async", "gpt-oss-120b")], indirect=True
)
def test_both_systems_have_the_same_flags_but_for_the_degree(cell: Cell) -> None:
    ours, stock = (cell.path_and_flags(ours=of) for of in (True, False))
    assert ours[0] == stock[0]
    assert set(ours) - set(stock) == {f"--data-parallel-size={cell.degree}", "--policy=manual"}
    assert set(stock) - set(ours) == {
        "--data-parallel-size=1",
        f"--tensor-parallel-size={cell.degree}",
    }
    assert [flag for flag in ours if "max-num-seqs" in flag][-1] == "--max-num-seqs=256"


@pytest.mark.parametrize("cell", [(1, "async", "llama-3-70b")], indirect=True)
def test_engines_alone_are_those_of_data_parallelism_on_both_sides(cell: Cell) -> None:
    ours, stock = (cell.path_and_flags(ours=of) for of in (True, False))
    assert set(ours) - set(stock) == {"--policy=manual"}
    assert {"--data-parallel-size=2", "--hardware=h200x8"} <= set(stock)
    assert cell.copies == 2


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
