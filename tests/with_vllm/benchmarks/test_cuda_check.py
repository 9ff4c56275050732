"""The check of a GPU: its waves, its budget, and its table. Its servers are not started here."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.cuda_check.checks import ROW_3, waves
from benchmarks.cuda_check.lines import (
    Limits,
    Line,
    Outcome,
    Result,
    carry_out,
    one_after_the_other,
    servers_of,
)
from benchmarks.cuda_check.page import BEGIN, END, table, write
from benchmarks.cuda_check.site import specs

STARTED = Outcome("start", Result.PASSED, "ready")


class Stands:
    """A site that is a word. Its servers start when they are asked about `slow` times."""

    def __init__(self, *, slow: dict[str, int] | None = None, lost: Sequence[str] = ()) -> None:
        self.word = "site"
        self.begun: list[list[str]] = []
        self.others_ended: list[list[str]] = []
        self.given_up: list[str] = []
        self._left = dict(slow or {})
        self._lost = lost

    def end_others(self, names: Sequence[str]) -> None:
        self.others_ended.append(list(names))

    def begin(self, names: Sequence[str]) -> None:
        self.begun.append(list(names))

    def starts(self) -> list[Outcome]:
        return [STARTED] if len(self.begun) == 1 and self.begun[0] else []

    def starting(self) -> set[str]:
        starting = {name for name, left in self._left.items() if left > 0}
        self._left = {name: left - 1 for name, left in self._left.items()}
        return starting

    def why_lost(self, name: str) -> str | None:
        return "no memory" if name in self._lost else None

    def give_up(self, names: Sequence[str]) -> None:
        self.given_up += names


def results(
    *made: Line[Stands],
    site: Stands | None = None,
    has_gpu: bool = True,
    limits: Limits = Limits(60.0),  # noqa: B008 - it is frozen
) -> list[Outcome]:
    return list(carry_out([made], site or Stands(), limits, has_gpu=has_gpu))


def fails(site: Stands) -> str:
    raise ValueError("in\nwords")


def line(
    name: str,
    run: Callable[[Stands], str] = lambda site: "",
    budget_s: float = 60.0,
    servers: tuple[str, ...] = (),
    *,
    quiet: bool = False,
) -> Line[Stands]:
    return Line(name, run, budget_s, servers, quiet=quiet)


def test_a_line_that_fails_ends_no_other() -> None:
    found = results(line("bad", fails), line("good", lambda site: f"of the {site.word}"))
    assert [(one.name, one.result, one.figure) for one in found] == [
        ("bad", Result.FAILED, "ValueError: in words"),
        ("good", Result.PASSED, "of the site"),
    ]


@pytest.fixture
def hangs() -> Iterator[Callable[[Stands], str]]:
    """A line that hangs until the end of the test."""
    goes_on = threading.Event()

    def run(site: Stands) -> str:
        goes_on.wait(10)
        return "late"

    yield run
    goes_on.set()


def test_a_line_that_hangs_ends_its_own_servers_alone(hangs: Callable[[Stands], str]) -> None:
    site = Stands()
    hung, after = (
        one
        for one in results(
            line("hangs", hangs, 0.05, ("a", "b")), line("good", servers=("c",)), site=site
        )
        if one is not STARTED
    )
    assert (hung.result, hung.figure) == (Result.OUT_OF_TIME, "not done after 0 s")
    assert site.given_up == ["a", "b"]
    assert after.result is Result.PASSED


def test_servers_of_a_wave_start_together_and_all_others_end() -> None:
    site = Stands()
    results(line("one", servers=("a", "b")), line("two", servers=("b", "c")), site=site)
    assert site.others_ended == [["a", "b", "c"]]
    assert site.begun[0] == ["a", "b", "c"]


def test_a_start_is_a_row_of_its_own() -> None:
    assert results(line("one", servers=("a",)))[0] is STARTED


def test_a_line_runs_while_the_servers_of_an_earlier_one_start() -> None:
    site = Stands(slow={"slow": 3})
    found = results(line("one", servers=("slow",)), line("two", servers=("a",)), site=site)
    assert [one.name for one in found if one is not STARTED] == ["two", "one"]


def test_a_quiet_line_waits_until_nothing_starts() -> None:
    site = Stands(slow={"slow": 3})
    found = results(
        line("quiet", servers=("a",), quiet=True),
        line("of a", servers=("a",)),
        line("of slow", servers=("slow",)),
        site=site,
    )
    assert [one.name for one in found if one is not STARTED] == ["of a", "quiet", "of slow"]


def test_a_line_whose_server_does_not_start_is_not_run() -> None:
    site = Stands(lost=["bad"])
    *_, found = results(line("one", fails, servers=("a", "bad")), site=site)
    assert (found.result, found.figure) == (Result.NOT_RUN, "bad does not start: no memory")


def test_servers_of_lines_that_need_a_gpu_do_not_start_without_one() -> None:
    site = Stands()
    gpu = Line[Stands]("gpu", fails, 60.0, ("large",), needs_gpu=True)
    needs, found = results(gpu, line("one"), site=site, has_gpu=False)
    assert (needs.result, needs.figure) == (Result.NOT_RUN, "needs a GPU")
    assert found.result is Result.PASSED
    assert site.begun == [[]]


def test_lines_after_the_budget_are_not_run() -> None:
    site = Stands()
    found = results(line("late", fails), line("later", fails), limits=Limits(0.0), site=site)
    assert [(one.result, one.figure) for one in found] == [
        (Result.NOT_RUN, "the 0 s of the check are over")
    ] * 2
    assert site.begun == []


def test_the_budget_ends_while_servers_start() -> None:
    site = Stands(slow={"slow": 1 << 30})
    *_, found = results(line("one", servers=("slow",)), site=site, limits=Limits(0.2))
    assert found == Outcome("one", Result.NOT_RUN, "the 0.2 s of the check are over")


def test_the_budget_ends_a_line_that_hangs(hangs: Callable[[Stands], str]) -> None:
    (found,) = results(line("hangs", hangs), limits=Limits(0.1))
    assert found.result is Result.OUT_OF_TIME


def test_patience_gives_a_line_more_time() -> None:
    def takes_long(site: Stands) -> str:
        threading.Event().wait(0.2)
        return "done"

    (found,) = results(line("slow", takes_long, 0.05), limits=Limits(60.0, patience=400))
    assert found.result is Result.PASSED


def test_one_after_the_other_keeps_lines_of_the_same_servers_together() -> None:
    lines = [line("1", servers=("a",)), line("2", servers=("a",)), line("3", servers=("b",))]
    found = one_after_the_other([[lines[0]], lines[1:]])
    assert [[one.name for one in wave] for wave in found] == [["1", "2"], ["3"]]


def test_lines_have_names_of_their_own() -> None:
    names = [line.name for wave in waves() for line in wave]
    assert len(set(names)) == len(names)


def test_servers_of_all_lines_are_there_and_each_is_used() -> None:
    named = {name for wave in waves() for name in servers_of(wave)}
    assert named == set(specs(has_gpu=True)) == set(specs(has_gpu=False))


def test_row_3_is_first_and_kernels_are_last() -> None:
    first, *_, last = waves()
    assert first[0].name == ROW_3
    assert servers_of(last) == []


def test_what_is_timed_is_quiet() -> None:
    for one in (line for wave in waves() for line in wave):
        timed = any(word in one.name for word in ("beside stock", "steps of", "cutover", "time"))
        assert one.quiet or not timed, one.name


def test_both_sides_of_a_comparison_of_times_schedule_ahead() -> None:
    made = specs(has_gpu=True)
    for ours, stock in (
        ("ours compiled", "stock default"),
        ("ours lanes", "stock eager"),
        ("ours graphs", "stock graphs"),
    ):
        assert "--async-scheduling" in made[ours].flags
        assert "--no-async-scheduling" not in made[stock].flags
        assert made[ours].environment == made[stock].environment
    assert made["ours lanes"].engines == 2


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
