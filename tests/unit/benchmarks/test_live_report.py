"""Tables of live comparisons, from rows that are kept."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.link_verdict import HIGH, LOW, is_accepted, phase, verdict
from benchmarks.live_report import (
    FIGURES,
    bars,
    by_round,
    ratios,
    spread,
    summary,
    table,
    values,
    worst,
)

DP, TP = [100.0, 100.0, 100.0], [50.0, 200.0, 100.0]


def kept(phases: Sequence[str] = ("low",), **systems: Sequence[float]) -> dict[str, Any]:
    """Return rows in which every figure of a system has these values in each phase."""
    rows = [
        {"system": name.replace("_", "-"), "phase": at, "figure": figure, "values": list(found)}
        for name, found in systems.items()
        for at in phases
        for figure in (*FIGURES, "completed")
    ]
    rows += [
        {"system": name.replace("_", "-"), "phase": "all", "figure": "switches", "values": [0.0]}
        for name in systems
    ]
    return {"rows": rows}


def test_a_ratio_is_to_the_better_fixed_layout_of_the_same_round() -> None:
    found = values(kept(static_dp=DP, static_tp=TP, auto=[50.0, 110.0, 150.0]))
    assert ratios(found, "auto", "low", "mean_ttft_ms") == pytest.approx([1.0, 1.1, 1.5])


def test_stock_vllm_is_not_the_better_fixed_layout() -> None:
    found = values(kept(stock_dp=[1.0], static_dp=[100.0], static_tp=[200.0]))
    assert ratios(found, "static-tp", "low", "mean_ttft_ms") == [2.0]


def test_a_phase_that_a_layout_did_not_serve_compares_with_the_other() -> None:
    rows = kept(static_dp=[100.0], static_tp=[200.0], auto=[300.0])
    rows["rows"] = [r for r in rows["rows"] if (r["system"], r["phase"]) != ("static-dp", "low")]
    assert ratios(values(rows), "auto", "low", "mean_ttft_ms") == [1.5]


@pytest.mark.parametrize(("served", "expected"), [(1.0, [1.5]), (0.5, [])])
def test_a_layout_that_refused_a_long_request_is_not_compared_with(
    served: float, expected: list[float]
) -> None:
    rows = kept(["long"], static_tp=[200.0], auto=[300.0])
    for row in rows["rows"]:
        if (row["system"], row["figure"]) == ("static-tp", "completed"):
            row["values"] = [served]
    assert ratios(values(rows), "auto", "long", "mean_ttft_ms") == expected


def test_a_round_that_one_system_alone_has_is_not_compared() -> None:
    found = values(kept(static_dp=[100.0, 100.0], static_tp=[200.0, 200.0], auto=[150.0]))
    assert ratios(found, "auto", "low", "mean_ttft_ms") == [1.5]


def test_the_worst_phase_is_that_of_the_largest_median() -> None:
    rows = kept(["low", "burst"], static_dp=[100.0], static_tp=[100.0], auto=[100.0])
    changed = next(r for r in rows["rows"] if r["system"] == "auto" and r["phase"] == "burst")
    changed["values"] = [130.0]
    at = worst(values(rows), "auto")
    assert at is not None
    assert (at.phase, at.figure, at.median) == ("burst", "mean_ttft_ms", 1.3)


def test_several_rounds_have_their_smallest_and_largest() -> None:
    assert spread([1.0, 3.0, 2.0], 1) == "2.0 [1.0..3.0]"


def test_one_round_has_no_spread() -> None:
    assert spread([2.0]) == "2"


def test_the_table_has_a_row_for_each_phase_and_system() -> None:
    lines = table(kept(["low", "burst"], static_dp=[1.0], static_tp=[2.0])).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| low", "static-dp"],
        ["| low", "static-tp"],
        ["| burst", "static-dp"],
        ["| burst", "static-tp"],
    ]


def test_the_table_leaves_cells_without_figures_empty() -> None:
    rows = kept(static_dp=[0.0], static_tp=[1.0])
    rows["rows"] = [
        r for r in rows["rows"] if r["system"] != "static-dp" or r["figure"] in ("completed",)
    ]
    assert "| low | static-dp |  |  |  |  |  |  | 0 % |  |" in table(rows)


def test_the_short_table_names_the_worst_phase_and_the_switches() -> None:
    line = summary(kept(static_dp=[100.0], static_tp=[200.0], auto=[150.0])).splitlines()[-1]
    assert line == "| auto | 150 | 1.50 | low, mean TTFT | 0 switches |"


def test_a_system_that_made_no_switch_is_said_to_have_made_none() -> None:
    lines = table(kept(static_dp=[1.0], auto=[2.0])).splitlines()
    assert lines[-2].endswith("| 1.00 |  |")
    assert lines[-1].endswith("| 2.00 | 0 switches |")


def test_each_round_has_its_switches() -> None:
    rows = kept(static_dp=[1.0, 1.0], auto=[2.0, 2.0])
    next(r for r in rows["rows"] if (r["system"], r["phase"]) == ("auto", "all"))["values"] = [0, 2]
    assert table(rows).splitlines()[-1].endswith("| 0, 2 |")


def test_each_rate_has_its_switches() -> None:
    rows = kept(["0.4, others", "0.7, others"], static_dp=[1.0], auto=[2.0])
    rows["settings"] = {"shares": [0.4, 0.7]}
    next(r for r in rows["rows"] if (r["system"], r["phase"]) == ("auto", "all"))["values"] = [0, 2]
    found = [line for line in table(rows).splitlines() if "| auto |" in line]
    assert [line.split(" | ")[-1] for line in found] == ["0 switches |", "2 |"]


def test_ratios_over_all_requests_are_of_rounds_and_not_of_medians() -> None:
    rows = kept(["all"], static_dp=[100.0, 200.0, 400.0], auto=[120.0, 400.0, 200.0])
    assert "mean E2E 1.20 and 2.00 and 0.50, P90 E2E" in by_round(rows)
    assert "in these rounds: 0 switches." in by_round(rows)
    line = summary(rows_with_low(rows)).splitlines()[-1]
    assert "| 1.20, 2.00, 0.50 |" in line


def rows_with_low(rows: dict[str, Any]) -> dict[str, Any]:
    """Return these rows with the same figures in a phase `low`."""
    low = [{**row, "phase": "low"} for row in rows["rows"] if row["figure"] != "switches"]
    return {"rows": rows["rows"] + low}


def shaped(together_low: float, apart_high: float) -> dict[str, Any]:
    """Return rows of two loads, with 100 for the other layout of each."""
    low = kept([phase(LOW)], static_dp=[100.0], static_tp=[together_low])
    high = kept([phase(HIGH)], static_dp=[apart_high], static_tp=[100.0])
    return {"rows": low["rows"] + high["rows"]}


@pytest.mark.parametrize(
    ("together_low", "apart_high", "accepted"),
    [(85.0, 50.0, True), (86.0, 50.0, False), (85.0, 51.0, False)],
)
def test_the_link_is_accepted_if_both_conditions_hold(
    together_low: float, apart_high: float, accepted: bool
) -> None:
    assert is_accepted(shaped(together_low, apart_high)) is accepted


def test_the_verdict_marks_what_was_missed() -> None:
    text = verdict(shaped(90.0, 50.0))
    assert (
        "static-tp / static-dp at 0.1 of capacity, mean TPOT: 0.90, at most 0.85 (missed)" in text
    )
    assert text.endswith("not accepted.")


def test_the_fixed_layouts_of_another_comparison_are_named() -> None:
    found = values(kept(wide=[100.0], narrow=[80.0], auto=[120.0]))
    at = worst(found, "auto", fixed=("wide", "narrow"))
    assert at is not None
    assert at.median == 1.5


def test_bars_hold_only_if_no_cell_of_any_round_is_beyond_them() -> None:
    """The median of a cell may hide a round, and one cell may be beyond where another is worst."""
    rows = [
        {"system": name, "phase": phase, "figure": "mean_ttft_ms", "values": numbers}
        for phase, by_name in {
            "low": {
                "static-dp": [130.0, 130.0],
                "static-tp": [100.0, 100.0],
                "auto": [108.0, 100.0],
            },
            "burst": {
                "static-dp": [100.0, 100.0],
                "static-tp": [140.0, 130.0],
                "auto": [100.0, 112.0],
            },
        }.items()
        for name, numbers in by_name.items()
    ]
    text = bars({"rows": rows})
    assert "`auto` has 1.08 and 1.12 of the best" in text
    assert "at most 1.10, **missed**" in text
    assert "`static-dp` 1.30 and 1.30, `static-tp` 1.40 and 1.30 (bar: at least 1.25, held)" in text
