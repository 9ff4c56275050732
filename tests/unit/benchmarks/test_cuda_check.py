"""The check of a GPU: its lines, its budget, and its table. Its servers are not started here."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.cuda_check.checks import lines
from benchmarks.cuda_check.lines import Limits, Line, Needed, NotRun, Outcome, Result, carry_out
from benchmarks.cuda_check.page import BEGIN, END, table, write
from benchmarks.cuda_check.site import specs

GPU_S, STARTS_S = 600.0, 100.0


class Stands:
    """A site that is a word, whose servers are stand-ins."""

    def __init__(self, prepares: Callable[[Needed], None] = lambda needed: None) -> None:
        self.word = "site"
        self.given_up = threading.Event()
        self.overdue: tuple[str, ...] = ()
        self._prepares = prepares

    def prepare(self, needed: Needed) -> None:
        self._prepares(needed)

    def give_up(self, overdue: Sequence[str]) -> None:
        self.overdue = tuple(overdue)
        self.given_up.set()


def results(
    *made: Line[Stands],
    site: Stands | None = None,
    has_gpu: bool = True,
    limits: Limits = Limits(60.0, 60.0),  # noqa: B008 - it is frozen
) -> list[Outcome]:
    return list(carry_out(made, site or Stands(), limits, has_gpu=has_gpu))


def fails(site: Stands) -> str:
    raise ValueError("in\nwords")


def line(name: str, run: Callable[[Stands], str], budget_s: float = 60.0) -> Line[Stands]:
    return Line(name, run, budget_s)


def test_a_line_that_fails_ends_no_other() -> None:
    found = results(line("bad", fails), line("good", lambda site: f"of the {site.word}"))
    assert [(one.name, one.result, one.figure) for one in found] == [
        ("bad", Result.FAILED, "ValueError: in words"),
        ("good", Result.PASSED, "of the site"),
    ]


def test_a_line_that_hangs_is_out_of_time_and_its_servers_are_ended() -> None:
    site, goes_on = Stands(), threading.Event()

    def hangs(site: Stands) -> str:
        goes_on.wait(10)
        return "late"

    hung, after = results(line("hangs", hangs, 0.05), line("good", lambda _: ""), site=site)
    goes_on.set()
    assert (hung.result, hung.figure) == (Result.OUT_OF_TIME, "not done after 0 s")
    assert site.overdue == ()
    assert site.given_up.is_set()
    assert after.result is Result.PASSED


def test_servers_that_hang_at_their_start_are_ended_and_the_check_goes_on() -> None:
    goes_on, needs = threading.Event(), Needed(("slow",))

    def prepares(needed: Needed) -> None:
        if needed.servers:
            goes_on.wait(10)

    site = Stands(prepares)
    slow = Line[Stands]("slow", lambda _: "", 60.0, needs)
    found, after = results(
        slow, line("good", lambda _: ""), site=site, limits=Limits(60.0, start_s=0.05)
    )
    goes_on.set()
    assert found.result is Result.OUT_OF_TIME
    assert found.figure == "its servers were not ready after 0 s"
    assert site.overdue == ("slow",)
    assert site.given_up.is_set()
    assert after.result is Result.PASSED


def test_a_line_whose_server_does_not_start_is_not_run() -> None:
    def prepares(needed: Needed) -> None:
        raise NotRun("it does not start: no memory")

    (found,) = results(line("one", fails), site=Stands(prepares))
    assert (found.result, found.figure) == (Result.NOT_RUN, "it does not start: no memory")


def test_a_line_that_needs_a_gpu_is_not_run_without_one() -> None:
    (found,) = results(Line("gpu", fails, 60.0, needs_gpu=True), has_gpu=False)
    assert (found.result, found.figure) == (Result.NOT_RUN, "needs a GPU")


def test_a_line_after_the_budget_is_not_run() -> None:
    (found,) = results(line("late", fails), limits=Limits(0.0, 60.0))
    assert (found.result, found.figure) == (Result.NOT_RUN, "the 0 s of the check are over")


def test_patience_gives_a_line_more_time() -> None:
    def takes_long(site: Stands) -> str:
        threading.Event().wait(0.2)
        return "done"

    (found,) = results(line("slow", takes_long, 0.05), limits=Limits(60.0, 60.0, patience=400))
    assert found.result is Result.PASSED


def test_lines_have_names_of_their_own() -> None:
    names = [line.name for line in lines()]
    assert len(set(names)) == len(names)


def test_budgets_of_all_lines_leave_time_to_start_servers() -> None:
    assert sum(line.budget_s for line in lines()) <= GPU_S - STARTS_S


def test_servers_of_all_lines_are_there() -> None:
    needs = [line.needs for line in lines()]
    named = {name for of in needs for name in (*of.servers, *of.beside, *of.ahead)}
    assert named == set(specs(has_gpu=True))


def test_servers_that_start_ahead_are_used_by_a_later_line() -> None:
    later = lines()
    while later:
        first, *later = later
        assert set(first.needs.ahead) <= {name for line in later for name in line.needs.servers}


def test_nothing_starts_while_steps_are_timed() -> None:
    timed = [line for line in lines() if line.name.startswith("lane 1 ")]
    assert len(timed) == 4
    assert not any(line.needs.ahead for line in timed)


def test_triton_attention_is_asked_for_on_a_gpu_alone() -> None:
    flag = "--attention-backend=TRITON_ATTN"
    assert flag in specs(has_gpu=True)["ours float32"].flags
    assert flag not in specs(has_gpu=False)["ours float32"].flags


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
