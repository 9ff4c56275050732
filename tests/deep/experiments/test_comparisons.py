"""The page of live comparisons and the tables of docs/benchmarks.md are those of the rows that are
kept.
"""

import json
import re
from pathlib import Path

import pytest

from experiments import comparisons, live

TABLE_HEAD = "| phase | system |"


def rows(**values: float) -> str:
    """Return a file of rows in which every figure of a system has one value."""
    found = [
        {"system": name.replace("_", "-"), "phase": "low", "figure": figure, "values": [value]}
        for name, value in values.items()
        for figure in (*comparisons.live_report.FIGURES, "completed")
    ]
    found += [
        {"system": row["system"], "phase": "all", "figure": "switches", "values": [2.0]}
        for row in found
        if row["figure"] == "completed"
    ]
    settings = {"rounds": 3, "capacity_rps": 2.5, "regime": "shm"}
    return json.dumps({"commit": "2b2ef467", "avx512": True, "settings": settings, "rows": found})


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of numbers with those of emulated devices alone."""
    emulated = comparisons.NUMBERS / "emulated.json"
    (tmp_path / "emulated.json").write_text(emulated.read_text(encoding="utf-8"), "utf-8")
    monkeypatch.setattr(comparisons, "NUMBERS", tmp_path)
    return tmp_path


def test_the_page_is_that_of_its_rows() -> None:
    assert comparisons.PAGE.read_text(encoding="utf-8") == comparisons.page()


def test_benchmarks_have_the_table_of_emulated_devices() -> None:
    table = comparisons.measured_values()["emulated table"]
    assert "| auto |" in table
    assert table in live.BENCHMARKS.read_text(encoding="utf-8")


@pytest.mark.usefixtures("kept")
def test_a_comparison_without_rows_is_said_to_be_not_run() -> None:
    text = comparisons.page()
    assert text.count(comparisons.NOT_RUN) == 10
    assert TABLE_HEAD not in text


def test_a_comparison_with_rows_has_its_table_and_its_sizes(kept: Path) -> None:
    text = rows(static_dp=100.0, static_tp=200.0, auto=150.0)
    (kept / "live_quiet_and_bursts.json").write_text(text, "utf-8")
    page = comparisons.page()
    assert "| low | auto | 150 | 150 |" in page
    assert "| 1.50 | 2 |" in page
    assert "Commit 2b2ef46, 3 rounds, a capacity of 2.5 requests/s, no emulated link" in page


def test_benchmarks_have_the_short_table_of_two_engines_once_they_ran(kept: Path) -> None:
    text = rows(static_dp=100.0, static_tp=200.0, auto=150.0)
    for name in ("quiet_and_bursts", "trace"):
        (kept / f"live_{name}.json").write_text(text, "utf-8")
    section = live.section(comparisons.measured_values())
    assert "| auto | 150 | 1.50 | low, mean TTFT | 2 |" in section
    assert comparisons.NOT_RUN not in section


MAY_SWITCH = re.compile(
    r"^\|(?: [^|]+ \|)? (?:auto|context|gyges|load|unaware, live) \|.*\| ([^|]*) \|$", re.M
)
"""A row of a live table, with its last cell."""
WITH_SWITCHES = re.compile(r"^\|.*\| switches \|\n(?:\|.*\n)+", re.M)
SWITCHES = re.compile(r"0 switches|\d+(, \d+)*")


@pytest.mark.parametrize(
    "text", [comparisons.PAGE, live.BENCHMARKS], ids=["comparisons", "benchmarks"]
)
def test_each_live_row_of_a_system_that_may_switch_says_how_often_it_did(text: Path) -> None:
    """A ratio of a server that made no switch is of its layout."""
    tables = WITH_SWITCHES.findall(text.read_text(encoding="utf-8"))
    found = [cell for table in tables for cell in MAY_SWITCH.findall(table)]
    assert len(found) >= 2
    assert all(SWITCHES.fullmatch(cell) for cell in found), found


@pytest.mark.parametrize("name", ["live_long_prompts", "live_urgent_requests"])
def test_rows_without_a_switch_are_not_shown_as_a_gain_of_switching(name: str) -> None:
    """The rows have a count of 0, and the page says so beside them."""
    kept = comparisons.live_report.read(comparisons.NUMBERS / f"{name}.json")
    counts = comparisons.live_report.values(kept)["auto", "all", "switches"]
    assert 0.0 in counts
    table = comparisons.live_report.table(kept)
    assert table in comparisons.PAGE.read_text(encoding="utf-8")
    assert table.count("0 switches") >= 2
