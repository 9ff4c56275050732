"""Rows and tables of benchmarks/chaos.py, made of outcomes whose times are said here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos_cases import Case
from benchmarks.chaos_report import Outcome, loss_rows, print_outcomes
from harness import chaos_table
from harness.chaos_load import Asked
from harness.chaos_table import LossRow, Spread
from harness.storm_load import Job

JOB = Job("short", (1, 2), 40, 7)


def outcome(
    case: Case, noticed_s: float = 0.1, gap_s: float = 0.2, asked: tuple[Asked, ...] = ()
) -> Outcome:
    """Return a case with one stream that lost its group and one that did not."""
    return Outcome(
        case,
        asked,
        detected_s=noticed_s,
        back_s=2.0,
        orphaned_s=[0.5],
        gaps_s=[gap_s],
    )


def case(
    phase: str = "decode", layout: str = "2+2", how: str = "kill", repetition: int = 0
) -> Case:
    """Return a case in which engine 0, a leader, is lost."""
    return Case(phase, layout, "leader", how, 0, repetition)


def test_cases_of_one_kind_are_one_row() -> None:
    times_s = (0.1, 0.2, 0.6)
    [row] = loss_rows([outcome(case(repetition=n), s) for n, s in enumerate(times_s)])
    assert (row.key, row.cases) == (("decode", "leader", "kill", "2+2"), 3)
    assert row.times["noticed"] == Spread(0.2, 0.6)


def test_rows_follow_the_order_of_phases_and_layouts() -> None:
    cases = (case("decode", "4"), case("prefill", "4"), case("decode", "1+1+1+1"))
    rows = loss_rows([outcome(lost) for lost in cases])
    assert [(row.phase, row.layout) for row in rows] == [
        ("prefill", "4"),
        ("decode", "1+1+1+1"),
        ("decode", "4"),
    ]


def test_row_counts_requests_that_failed_or_are_wrong() -> None:
    asked = (Asked("a", JOB, failed="503"), Asked("b", JOB, wrong="a token"), Asked("c", JOB))
    [row] = loss_rows([outcome(case(), asked=asked)])
    assert (row.failed, row.wrong, row.missed) == (1, 1, ["failed", "wrong"])


def test_case_that_did_not_reach_its_phase_has_no_times() -> None:
    [row] = loss_rows([Outcome(case(), ())])
    assert set(row.times.values()) == {None}


@pytest.mark.parametrize(
    ("how", "noticed_s", "gap_s", "missed"),
    [
        ("kill", 1.49, 0.99, []),
        ("kill", 1.5, 0.2, ["noticed"]),
        ("freeze", 1.5, 0.2, []),
        ("freeze", 1.5, 1.0, ["gap of others"]),
    ],
)
def test_row_misses_the_bars_that_its_worst_case_reaches(
    how: str, noticed_s: float, gap_s: float, missed: list[str]
) -> None:
    [row] = loss_rows([outcome(case(how=how), noticed_s, gap_s)])
    assert row.missed == missed


def test_row_misses_the_same_bars_after_it_is_read(tmp_path: Path) -> None:
    """0.996 s is 1.00 s in the file."""
    rows: list[LossRow] = loss_rows([outcome(case(), gap_s=0.996)])
    chaos_table.write(tmp_path / "rows.csv", rows)
    assert chaos_table.read(tmp_path / "rows.csv") == rows
    assert rows[0].missed == ["gap of others"]


def test_outcomes_are_printed_as_totals_and_misses(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcomes([outcome(case("prefill")), outcome(case("decode"), gap_s=1.2)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "all all 2 2 0 0 0.10 0.50 1.20 2.00 1" in lines
    row = "decode leader kill 2+2 1 0 0 0.10 / 0.10 0.50 / 0.50 1.20 / 1.20 2.00 / 2.00"
    assert f"{row} gap of others" in lines
    assert not [line for line in lines if line.startswith("prefill leader")]
    assert "gap of other streams, worst: 1.20 s (bar 1 s: MISSED)" in lines


def test_no_outcome_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As when the server did not start."""
    print_outcomes([])
    assert "MISSED" not in capsys.readouterr().out
