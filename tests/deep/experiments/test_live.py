"""Pages of live measurements: docs/lab/results.md and docs/benchmarks.md are those of the rows that
are kept.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import product
from pathlib import Path
from statistics import median

import pytest

from experiments import comparisons, live
from experiments.common import ROOT
from flying_serving.errors import ConfigError

RUNS, LOST = live.read()
FIGURE = re.compile(r"\d+\.\d+")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")
NO_FIGURE = re.compile(
    r"\d+\.\d+\.[\d.+a-z]+|arXiv \d+\.\d+|Apache 2\.0|3\.1[1-4]|`[^`]*`|^    .*", re.M
)
"""Versions, papers, code and commands."""
NAMED = ("soak-860655b", "transform")
"""Runs whose figures stand in the prose of docs/benchmarks.md."""
COMMANDS = (
    r"python -m (benchmarks\.\w+)|make (chaos|fuzz)|(pytest "
    r"tests/protocol)|(flying-serving simulate)|(curl) "
)
NOT_NOTED = {"eight-start", "flood-stock", "mapped-kv", "move-storm", "survival-cost"}
"""Runs of which nobody wrote down the command. No run is to be added here."""


def test_results_page_is_that_of_its_rows() -> None:
    assert live.PAGE.read_text(encoding="utf-8") == live.page()


def test_section_of_benchmarks_is_that_of_its_rows() -> None:
    text = live.BENCHMARKS.read_text(encoding="utf-8")
    assert live.between_marks(text, live.section(comparisons.measured_values())) == text


def blocks(text: str) -> list[str]:
    """The paragraphs and the items of lists of a page."""
    return re.split(r"\n(?=- )|\n\n", text)


@pytest.mark.parametrize("page", [live.BENCHMARKS, live.README], ids=["benchmarks", "README"])
def test_prose_beside_a_section_has_no_figure_but_of_a_run_that_it_names(page: Path) -> None:
    """What stands between the marks is written from rows; the test below compares the others."""
    before, rest = page.read_text(encoding="utf-8").split(live.BEGIN)
    text = before + rest.split(live.END, 1)[1]
    others = [block for block in blocks(text) if not any(f"(`{key}`):" in block for key in NAMED)]
    assert not [one for block in others for one in FIGURE.findall(NO_FIGURE.sub("", block))]


@pytest.mark.parametrize("key", NAMED)
def test_benchmarks_have_the_figures_of_a_run_that_they_name(key: str) -> None:
    items = blocks(live.BENCHMARKS.read_text(encoding="utf-8"))
    item = next(block for block in items if f"(`{key}`):" in block).replace(key, "")
    run = RUNS[key]
    known = " ".join(
        [run.rounds, run.setting, *(cell for row in run.rows.values() for cell in row)]
    )
    figures = set(NUMBER.findall(item))
    assert len(figures) > 4
    assert figures <= set(NUMBER.findall(known))


@pytest.mark.parametrize("key", RUNS)
def test_run_is_on_the_page_with_its_command_and_commit(key: str) -> None:
    run, text = RUNS[key], live.page()
    shown = " ".join(text.partition(f"### {key}: ")[2].partition("\n|")[0].split())
    assert run.command is None or f"`{run.command}`" in shown
    assert all(commit in shown for commit, _ in run.commits)


@pytest.mark.parametrize("key", RUNS)
def test_run_names_a_command_that_there_is(key: str) -> None:
    command = RUNS[key].command
    assert (command is None) == (key in NOT_NOTED or RUNS[key].summary)
    if command is not None:
        found = re.match(COMMANDS, command)
        assert found, command
        if module := found[1]:
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


@pytest.mark.parametrize("key", RUNS)
def test_run_has_a_figure_for_each_column(key: str) -> None:
    run = RUNS[key]
    assert run.rows and run.commits and run.commit_is in live.AT
    assert {len(figures) for figures in run.rows.values()} == {len(run.columns) - 1}


def test_prose_outside_of_runs_takes_measured_figures_from_rows() -> None:
    """A template has no decimal number of its own, but for vLLM's version and settings of runs."""
    settings = {"0.32", "0.75", "0.8", "0.3", "0.7"}
    for name in ("results", "measured", "front_page", "front_page_loses"):
        text = (live.TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
        assert set(FIGURE.findall(live._PLACE.sub("", text))) <= settings


def test_numbers_have_no_spread_and_ratios_two_digits() -> None:
    assert live._number("load-link | auto | low, mean TTFT", RUNS) == "428"
    assert live._number("load-link | auto over static-dp | low, mean TTFT", RUNS) == "0.73"
    assert live._number("load-link | auto / better layout | low, mean TTFT", RUNS) == "1.06"


@pytest.mark.parametrize(
    ("row", "column"), [("auto", "no such column"), ("no such row", "tokens/s")]
)
def test_a_place_without_a_figure_is_an_error_that_names_it(row: str, column: str) -> None:
    with pytest.raises(ConfigError, match="no such"):
        RUNS["load-link"].cell(row, column)


def test_a_run_that_loses_a_row_changes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(live.PATH.read_text(encoding="utf-8"))
    del found["runs"]["context-other-settings"]["rows"]["2.5, 60, 8,192, 6,000"]
    path = tmp_path / "live.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    changed = live.read(path)
    monkeypatch.setattr(live, "read", lambda: changed)
    assert live.page() != live.PAGE.read_text(encoding="utf-8")


LAYOUTS = ("stock, data parallel", "stock, tensor parallel", "static-dp", "static-tp")
COMPARED = [key for key, run in RUNS.items() if "auto" in run.rows and set(LAYOUTS) & set(run.rows)]
STATED = re.compile(
    r"(?:(?P<before>static-\w+): )?(?P<ratio>\d+\.\d+)(?: of (?P<after>[a-z -]*[a-z]))?"
)
MEDIAN = re.compile(r"\d+(\.\d+)?")
BAR = re.compile(r"bar (\d+\.\d+)")
OF_ROUNDS = re.compile(r"((?:[\d.]+, )+[\d.]+) \(median ([\d.]+)\)")


def median_of(run: live.Run, row: str, column: str) -> Decimal | None:
    """The median in a cell, if there is one."""
    match = MEDIAN.match(run.cell(row, column))
    return Decimal(match[0]) if match else None


def layouts_of(run: live.Run, named: str, column: str) -> list[str]:
    """The layouts that a ratio may be over: the one that is named, or the better one in the
    column.
    """
    rows = [name for name in LAYOUTS if name in run.rows and median_of(run, name, column)]
    if "better layout" not in named:
        short = {name: name.removeprefix("stock, ") for name in rows}
        return [name for name in rows if short[name] in named]
    best = max if column == "tokens/s" else min
    return [best(rows, key=lambda name: median_of(run, name, column))] if rows else []


def rounded(value: Decimal) -> tuple[Decimal, Decimal]:
    """Between which values it was before it was rounded."""
    half = Decimal(1).scaleb(int(value.as_tuple().exponent)) / 2
    return value - half, value + half


def stated(key: str) -> Iterator[tuple[str, str, str, str, str]]:
    """(run, row, column, layout as named, ratio) of each ratio of `auto` in a table beside
    layouts.
    """
    run = RUNS[key]
    for row in run.rows:
        for column, cell in zip(run.columns[1:], run.rows[row], strict=True):
            if row.startswith("auto /") and column != "switches":
                for part in cell.split("; "):
                    if match := STATED.match(part):
                        yield (
                            key,
                            row,
                            column,
                            match["before"] or match["after"] or row,
                            match["ratio"],
                        )


@pytest.mark.parametrize(
    ("key", "row", "column", "named", "ratio"), [case for key in COMPARED for case in stated(key)]
)
def test_a_stated_ratio_is_that_of_the_medians(
    key: str, row: str, column: str, named: str, ratio: str
) -> None:
    run = RUNS[key]
    (layout,) = layouts_of(run, named, column)
    ours, other = median_of(run, "auto", column), median_of(run, layout, column)
    assert ours is not None and other is not None
    ratios = [a / b for a, b in product(rounded(ours), rounded(other))]
    low, high = rounded(Decimal(ratio))
    assert min(ratios) <= high and max(ratios) >= low, f"{ours} / {other} is not {ratio}"


@pytest.mark.parametrize("key", COMPARED)
def test_each_column_has_the_ratio_over_its_better_layout(key: str) -> None:
    """None is left out where `auto` is behind."""
    run = RUNS[key]
    over = {
        (column, layout)
        for _, _, column, named, _ in stated(key)
        for layout in layouts_of(run, named, column)
    }
    for column in run.columns[1:]:
        better = layouts_of(run, "better layout", column)
        if column not in ("switches", "tokens/s") and better and median_of(run, "auto", column):
            assert (column, better[0]) in over, column


@pytest.mark.parametrize("key", COMPARED)
def test_a_ratio_is_marked_as_missed_if_it_is_beyond_its_bar(key: str) -> None:
    run = RUNS[key]
    for row in run.rows:
        for column, cell in zip(run.columns[1:], run.rows[row], strict=True):
            is_rate = column == "tokens/s"
            bar = BAR.search(cell) or (None if is_rate else BAR.search(row))
            if row.startswith("auto /") and bar and (match := STATED.match(cell)):
                above = Decimal(match["ratio"]) - Decimal(bar[1])
                assert ("missed" in cell) == (above < 0 if is_rate else above > 0), (row, column)


def test_the_median_of_rounds_is_theirs() -> None:
    cells = [cell for run in RUNS.values() for figures in run.rows.values() for cell in figures]
    found = [match for cell in cells if (match := OF_ROUNDS.search(cell))]
    assert len(found) > 10
    for match in found:
        assert median(map(float, match[1].split(", "))) == float(match[2]), match[0]


def test_ratios_by_rounds_are_on_the_page_with_their_median() -> None:
    for run in RUNS.values():
        for cell in run.rows.get("by rounds", ()):
            assert not cell or "(median " in cell


@pytest.mark.parametrize("key", RUNS)
def test_ratios_with_a_spread_say_that_they_are_by_rounds(key: str) -> None:
    run = RUNS[key]
    ratios = [n for n, column in enumerate(run.columns[1:]) if column == "ratio" or "/ " in column]
    if any(" [" in figures[n] for figures in run.rows.values() for n in ratios):
        assert "by rounds" in run.setting


@pytest.mark.parametrize("key", [name.strip("`") for name in RUNS["other-loads"].rows])
def test_a_summary_has_the_ratios_of_its_runs(key: str) -> None:
    summary, run = RUNS["other-loads"], RUNS[key]
    row = next(name for name in run.rows if name.startswith("auto /"))
    for column in summary.columns[1:]:
        where = f"burst, {column}" if column == "P90 TTFT" else f"low, {column}"
        shown = summary.cell(f"`{key}`", column).strip("*")
        assert shown == run.cell(row, column if column in run.columns else where), column
