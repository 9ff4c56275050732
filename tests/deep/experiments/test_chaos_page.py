"""docs/lab/results/chaos.md has the totals and every miss of docs/lab/results/numbers/chaos.csv.

The rows are summed up again here, from the cells of the file.
"""

import csv
from pathlib import Path

import pytest

from experiments import chaos_page, ledger, live
from experiments.chaos_page import PAGE, PATH
from harness import chaos_table

BAR_S = {"noticed": 1.5, "goes on": 3.0, "gap of others": 1.0}
TIMES = ("noticed", "goes on", "gap of others", "back")
SPLIT_PHASES = ("split before", "split after")
BLOCK_PHASES = ("blocks asked", "blocks reserved", "blocks lent", "release", "reclaim")
Line = dict[str, str]


def _lines() -> list[Line]:
    """Return the rows of the file by column."""
    with PATH.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _shown(heading: str) -> list[list[str]]:
    """Return the cells of the page's table below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    [table] = [table for name, table in ledger.tables(text) if name == heading]
    return table


def _of(phase: str, signal: str) -> list[Line]:
    return [
        line
        for line in _lines()
        if phase in ("all", line["phase"]) and signal in ("all", line["how"])
    ]


def _cases(phases: tuple[str, ...]) -> int:
    return sum(int(line["cases"]) for line in _lines() if line["phase"] in phases)


def _worst_s(line: Line, time: str) -> float:
    return float(line[f"{time}, worst (s)"] or 0.0)


def _misses(line: Line) -> bool:
    has_bar = [time for time in BAR_S if time != "noticed" or line["how"] == "kill"]
    is_wrong = int(line["failed"]) + int(line["wrong"]) > 0
    return is_wrong or any(_worst_s(line, time) >= BAR_S[time] for time in has_bar)


def test_page_is_that_of_its_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == chaos_page.page()


def test_totals_are_of_every_phase_and_signal() -> None:
    kinds = {(line["phase"], line["how"]) for line in _lines()}
    every = kinds | {("all", "kill"), ("all", "freeze"), ("all", "all")}
    shown = [(cells[0], cells[1]) for cells in _shown("Totals")]
    assert sorted(shown) == sorted(every)


@pytest.mark.parametrize("cells", _shown("Totals"), ids=lambda cells: ", ".join(cells[:2]))
def test_total_is_the_sum_of_the_rows(cells: list[str]) -> None:
    lines = _of(cells[0], cells[1])
    sums = [sum(int(line[name]) for line in lines) for name in ("cases", "failed", "wrong")]
    misses = sum(map(_misses, lines))
    assert [*map(int, cells[2:6]), int(cells[10])] == [len(lines), *sums, misses]


@pytest.mark.parametrize("cells", _shown("Totals"), ids=lambda cells: ", ".join(cells[:2]))
def test_time_of_a_total_is_the_worst_of_the_rows(cells: list[str]) -> None:
    lines = _of(cells[0], cells[1])
    shown = [0.0 if cell == "-" else float(cell) for cell in cells[6:10]]
    assert shown == [max(_worst_s(line, time) for line in lines) for time in TIMES]


def test_every_row_that_misses_a_bar_is_shown() -> None:
    names = ("phase", "as", "how", "layout")
    missing = [[line[name] for name in names] for line in _lines() if _misses(line)]
    assert [cells[:4] for cells in _shown("Rows that miss a bar")] == missing


def test_worst_rows_have_the_worst_time_of_each_signal() -> None:
    for time, signal, worst, _, row in _shown("Worst rows"):
        times = {
            ", ".join(list(line.values())[:4]): _worst_s(line, time) for line in _of("all", signal)
        }
        assert float(worst) == times[row] == max(times.values()), (time, signal)


def test_page_counts_the_cases_of_its_settings() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"In {_cases(BLOCK_PHASES)} cases, those with lent blocks," in text
    assert f"The {_cases(SPLIT_PHASES)} cases of split requests" in text


def test_run_has_the_figures_of_the_rows() -> None:
    run, lines = live.read()[0]["chaos"], _lines()
    cases = sum(int(line["cases"]) for line in lines)
    split = _cases(SPLIT_PHASES)
    worst_s = {time: max(_worst_s(line, time) for line in lines) for time in TIMES}
    assert run.rounds.startswith(f"{cases} cases, {split} of them, of split requests")
    goes_on = "streams that lost their group go on after, at most (s)"
    assert run.cell(goes_on, "figure") == f"{worst_s['goes on']:.2f}"
    gap = f"{worst_s['gap of others']:.2f}, missed"
    assert run.cell("longest gap of others (s)", "figure").startswith(gap)


def test_a_row_that_is_dropped_from_the_file_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = chaos_table.read(PATH)
    path = tmp_path / PATH.name
    chaos_table.write(path, others)
    monkeypatch.setitem(ledger.DATA_FILES, ledger.CHAOS, path)
    present, published = ledger.keys(ledger.present()), ledger.keys(ledger.published())
    gone = ledger.missing(published, present, ledger.removed())
    assert gone == [" / ".join((*ledger.CHAOS, ", ".join(first.key)))]


def test_rows_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    chaos_table.write(path, chaos_table.read(PATH))
    assert path.read_bytes() == PATH.read_bytes()


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("phase,as\nidle,leader\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the columns are not phase, as, how, layout, cases"):
        chaos_table.read(path)
