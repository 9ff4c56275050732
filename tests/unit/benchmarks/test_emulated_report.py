"""The table of a comparison on emulated devices: live over simulated, and over the best layout."""

import json

import pytest

from benchmarks.emulated_report import (
    FIGURES,
    PHASES,
    beside_simulator,
    medians,
    ratios,
    table,
)
from harness.live import ROOT

PAGE = ROOT / "docs" / "design" / "emulation.md"
ROWS = ROOT / "docs" / "lab" / "results" / "numbers" / "emulated.json"


def kept(**live: list[float]) -> dict[str, object]:
    """Return rows in which every figure of a system has these live values, and 100 simulated."""
    return {
        "rows": [
            {"system": name, "phase": phase, "figure": figure, "live": values, "simulated": [100.0]}
            for name, values in live.items()
            for phase in PHASES
            for figure in FIGURES
        ]
    }


def test_a_ratio_is_that_of_medians_over_the_best_fixed_layout() -> None:
    values = medians(kept(auto=[90.0, 110.0, 500.0], narrow=[100.0], wide=[200.0]))
    assert ratios(values, "auto", "low") == pytest.approx([1.1] * len(FIGURES))


def test_our_own_figures_are_not_the_best_fixed_layout() -> None:
    values = medians(kept(auto=[50.0], narrow=[100.0]))
    assert ratios(values, "narrow", "burst") == pytest.approx([1.0] * len(FIGURES))


def test_the_table_has_a_row_for_each_phase_and_system() -> None:
    lines = table(kept(auto=[50.0], narrow=[100.0])).splitlines()
    assert len(lines) == 2 + len(PHASES) * 2
    assert lines[3].startswith("| low | auto | 50 / 0.50 |")


def test_the_simulator_is_compared_over_all_requests_in_each_round() -> None:
    rows = [
        {
            "system": name,
            "phase": "all",
            "figure": "mean_e2el_ms",
            "live": live,
            "simulated": [100.0] * 3,
        }
        for name, live in (("auto", [90.0, 104.0, 120.0]), ("stock-dp", [106.0, 108.0, 90.0]))
    ]
    assert beside_simulator({"rows": rows}) == (
        "Over all requests, live mean E2E over the simulated one of the same load, by round: "
        "`stock-dp` 1.06, 1.08, 0.90; `auto` 0.90, 1.04, 1.20 (bar: within 5% in the median, "
        "**missed** by `stock-dp`)."
    )
    assert "median, met)" in beside_simulator({"rows": rows[:1]})
    with pytest.raises(ValueError, match="no row has the mean E2E"):
        beside_simulator(kept(auto=[50.0]))


def test_the_page_has_the_table_of_the_rows_that_are_kept() -> None:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    assert table(rows) in PAGE.read_text(encoding="utf-8")
