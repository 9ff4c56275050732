"""The check of a GPU: its lines, its budget, and its table. Its servers are not started here."""

import threading
from pathlib import Path

import pytest

from benchmarks.cuda_check.checks import lines
from benchmarks.cuda_check.lines import Line, Outcome, Result, carry_out
from benchmarks.cuda_check.page import BEGIN, END, table, write


def results(*made: Line[str], has_gpu: bool = True, budget_s: float = 60.0) -> list[Outcome]:
    """Run lines over a site that is a word."""
    ended: list[int] = []
    return list(
        carry_out(
            made,
            "site",
            has_gpu=has_gpu,
            budget_s=budget_s,
            given_up=lambda: ended.append(1),
        )
    )


def fails(site: str) -> str:
    raise ValueError("in\nwords")


def test_a_line_that_fails_ends_no_other() -> None:
    found = results(Line("bad", fails), Line("good", lambda site: f"of the {site}"))
    assert [(one.name, one.result, one.figure) for one in found] == [
        ("bad", Result.FAILED, "ValueError: in words"),
        ("good", Result.PASSED, "of the site"),
    ]


def test_a_line_that_hangs_is_given_up_and_its_servers_are_ended() -> None:
    ended, goes_on = threading.Event(), threading.Event()

    def hangs(site: str) -> str:
        goes_on.wait(10)
        return "late"

    hung = Line("hangs", hangs, deadline_s=0.05)
    (found, after) = carry_out(
        [hung, Line("good", lambda site: site)],
        "site",
        has_gpu=True,
        budget_s=60.0,
        given_up=ended.set,
    )
    goes_on.set()
    assert (found.result, found.figure) == (Result.FAILED, "not done after 0 s")
    assert ended.is_set()
    assert after.result is Result.PASSED


def test_a_line_that_needs_a_gpu_is_not_run_without_one() -> None:
    (found,) = results(Line("gpu", fails, needs_gpu=True), has_gpu=False)
    assert (found.result, found.figure) == (Result.NOT_RUN, "needs a GPU")


def test_a_line_after_the_budget_is_not_run() -> None:
    (found,) = results(Line("late", fails), budget_s=0.0)
    assert (found.result, found.figure) == (Result.NOT_RUN, "the 0 s of the check are over")


def test_lines_have_names_of_their_own() -> None:
    names = [line.name for line in lines()]
    assert len(set(names)) == len(names)
    assert sum("same as stock" in name for name in names) == 6


def test_the_table_replaces_the_last_one_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, table({"Device": "one"}, [Outcome("a", Result.PASSED, "1 | 2", 3.4)]))
    assert page.read_text() == (
        f"before\n{BEGIN}\n- Device: one\n\n| line | result | figure or reason | s |\n"
        f"|---|---|---|---|\n| a | passed | 1 / 2 | 3 |\n{END}\nafter\n"
    )


def test_a_page_without_marks_is_refused_and_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="cuda-check: begin"):
        write(page, "table")
    assert page.read_text() == "text"
