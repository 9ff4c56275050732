"""Pages of live measurements: docs/results.md and README's table are those of the rows that are kept."""

import json
import re
from pathlib import Path

import pytest

from experiments import live
from experiments.common import ROOT
from flying_serving.errors import ConfigError

RUNS, LOST = live.read()
FIGURE = re.compile(r"\d+\.\d+")
COMMANDS = r"python -m (benchmarks\.\w+)|make (chaos|fuzz)|(pytest tests/protocol)|(flying-serving simulate)|(curl) "
NOT_NOTED = {"eight-start", "flood-stock", "mapped-kv", "move-storm", "survival-cost"}
"""Runs of which nobody wrote down the command. No run is to be added here."""


def test_results_page_is_that_of_its_rows() -> None:
    assert live.PAGE.read_text(encoding="utf-8") == live.page()


def test_readme_section_is_that_of_its_rows() -> None:
    text = live.README.read_text(encoding="utf-8")
    assert live.readme(text) == text


def test_readme_table_has_the_figures_of_its_run() -> None:
    run = RUNS["load-link"]
    for name, figures in run.rows.items():
        shown = " | ".join(figure.partition(" [")[0].partition(" (")[0] for figure in figures)
        assert f"| {name} | {shown} |" in live.README.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", RUNS)
def test_run_is_on_the_page_with_its_command_and_commit(key: str) -> None:
    run, text = RUNS[key], live.page()
    shown = " ".join(text.partition(f"### {key}: ")[2].partition("\n|")[0].split())
    assert run.command is None or f"`{run.command}`" in shown
    assert all(commit in shown for commit, _ in run.commits)


@pytest.mark.parametrize("key", RUNS)
def test_run_names_a_command_that_there_is(key: str) -> None:
    command = RUNS[key].command
    assert (command is None) == (key in NOT_NOTED)
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
    for name in ("results", "measured"):
        text = (live.TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
        assert set(FIGURE.findall(live._PLACE.sub("", text))) <= settings


def test_numbers_have_no_spread_and_ratios_two_digits() -> None:
    assert live._number("load-link | auto | low, mean TTFT", RUNS) == "428"
    assert live._number("load-link | auto over static-dp | low, mean TTFT", RUNS) == "0.73"
    assert live._number("load-link | auto / better layout | low, mean TTFT", RUNS) == "1.06"


@pytest.mark.parametrize(("row", "column"), [("auto", "no such column"), ("no such row", "tokens/s")])
def test_a_place_without_a_figure_is_an_error_that_names_it(row: str, column: str) -> None:
    with pytest.raises(ConfigError, match="no such"):
        RUNS["load-link"].cell(row, column)


def test_a_run_that_loses_a_row_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(live.PATH.read_text(encoding="utf-8"))
    del found["runs"]["context-other-settings"]["rows"]["2.5, 60, 8,192, 6,000"]
    path = tmp_path / "live.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    changed = live.read(path)
    monkeypatch.setattr(live, "read", lambda: changed)
    assert live.page() != live.PAGE.read_text(encoding="utf-8")
