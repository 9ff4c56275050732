"""The page that counts which of three papers' numbers come out again."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from experiments.__main__ import ALL
from experiments.common import kept
from experiments.rows import Row
from experiments.three_papers import KINDS, PAPERS, compared, counts, kind


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[Row]]:
    """What the experiments of the papers compare."""
    folder: Path = tmp_path_factory.mktemp("results")
    names = [name for of_paper in PAPERS.values() for name in of_paper]
    return {name: ALL[name].pages(kept(name), folder) for name in names}


@pytest.mark.parametrize(
    ("paper", "ours", "higher", "expected"),
    [
        (2.0, 2.19, True, "within 10 %"),
        (2.0, 2.3, True, "better"),
        (2.0, 2.3, False, "worse"),
        (2.0, 1.7, True, "worse"),
        (2.0, 1.7, None, "neither better nor worse"),
        ((1.0, 2.0), 1.5, True, "within 10 %"),
        (0.0, 1.5, True, "no ratio"),
    ],
)
def test_kind_of_a_number(
    paper: float | tuple[float, float], ours: float, higher: bool | None, expected: str
) -> None:
    assert kind(Row("a number", paper, (ours,), higher)) == expected


@pytest.mark.parametrize("paper", PAPERS)
def test_each_number_of_a_paper_is_of_one_kind(
    rows: Mapping[str, Sequence[Row]], paper: str
) -> None:
    found = compared(rows, paper)
    assert len(found) > 20
    assert sum(counts(found).values()) == len(found)
    assert set(counts(found)) == set(KINDS)


@pytest.mark.parametrize("paper", PAPERS)
def test_what_is_worse_has_its_cause(rows: Mapping[str, Sequence[Row]], paper: str) -> None:
    worse = [one for one in compared(rows, paper) if kind(one) == "worse"]
    assert all(one.why for one in worse), [one.name for one in worse if not one.why]
