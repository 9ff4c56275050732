"""The servers of a cell: both have the same flags but for the degree."""

import pytest

from benchmarks.group_cell import Cell


@pytest.fixture
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """Return a cell whose model is not written."""
    monkeypatch.setattr("benchmarks.group_cell.make_model", lambda path, _: path)
    monkeypatch.setattr(
        "benchmarks.group_cell.server_flags",
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
