"""Runs and the report: an edit is seen by the tests of its room, and by nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from mutants import runs
from mutants.__main__ import LEAST_KILLED, files_for, report, sample
from mutants.edits import Edit, edits_of
from mutants.runs import Run, run

SOURCE = b"""def total(numbers):
    result = 0
    while numbers:
        result += numbers.pop()
    return result
"""
TEST = """from room.sums import total

def test_total():
    assert total([3, 4]) == 7

def test_nothing():
    assert total([0]) == 0
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Edit]:
    """A repository of one room; returns the edits of its module."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "room" / "sums.py").write_bytes(SOURCE)
    (tmp_path / "test_sums.py").write_text(TEST, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return edits_of("room/sums.py", SOURCE)


@pytest.mark.deep
def test_an_edit_is_seen_by_the_tests_and_not_in_the_file(room: list[Edit]) -> None:
    unedited = run(["test_sums.py"])
    assert unedited.verdict == "survived"
    assert {"pytest", "room.sums"} <= set(unedited.imported)
    (edit,) = (edit for edit in room if edit.after.startswith("result -="))
    found = run(["test_sums.py"], edit, unedited)
    assert (found.verdict, found.by) == ("killed", "test_sums.py::test_total")
    assert Path(edit.path).read_bytes() == SOURCE


@pytest.mark.deep
def test_the_text_of_an_edited_function_has_the_edit(room: list[Edit]) -> None:
    """Triton compiles that, and not the function."""
    Path("test_sums.py").write_text(
        "import inspect\nfrom room.sums import total\n"
        "def test_text():\n    assert 'result += numbers' in inspect.getsource(total)\n",
        encoding="utf-8",
    )
    (edit,) = (edit for edit in room if edit.after.startswith("result -="))
    assert run(["test_sums.py"], edit).by == "test_sums.py::test_text"


@pytest.mark.deep
def test_slow_tests_run_last_and_what_none_sees_survives(room: list[Edit]) -> None:
    (edit,) = (edit for edit in room if edit.before == "0")
    first = Run("survived", slow=frozenset({"test_sums.py::test_total"}))
    assert run(["test_sums.py"], edit, first).by == "test_sums.py::test_nothing"
    Path("test_sums.py").write_text("def test_none(): pass\n", encoding="utf-8")
    assert run(["test_sums.py"], edit).verdict == "survived"


@pytest.mark.deep
def test_a_run_without_end_is_ended(room: list[Edit], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MORE_S", 1)
    (edit,) = (one for one in room if one.before.startswith("result +="))
    endless = replace(edit, after="result += 1")
    assert run(["test_sums.py"], endless, Run("survived", processor_s=0.0)).verdict == "timeout"


def of(number: int) -> Edit:
    """Return some edit of a room of the product."""
    return Edit("flying_serving/predict/work.py", "f", number, str(number), "0", 0, 1)


def test_the_sample_does_not_change_with_other_edits() -> None:
    before = sample(map(of, range(1000)), 50)
    after = sample(map(of, range(10, 1010)), 50)
    assert len(before) == 50
    assert len(set(before) & set(after)) >= 45


def test_tests_of_the_edited_module_are_apart_from_the_others_of_its_area() -> None:
    (own,), others = files_for(of(1))
    assert own.endswith("predict/test_work.py")
    assert any(file.endswith("predict/test_steps.py") for file in others)
    assert own not in others


@pytest.mark.parametrize(
    ("survivors", "listed", "wrong"),
    [
        ([], [], []),
        ([1], [1], []),
        ([1], [], [f"survived: {of(1).path}:1: {of(1).name}"]),
        ([], [1], [f"listed, and no survivor: {of(1).name}"]),
        ([1, 2], [1, 2], [f"less than {LEAST_KILLED:.0%} are killed"]),
    ],
)
def test_report_is_wrong_if_survivors_are_not_those_of_the_list(
    survivors: list[int], listed: list[int], wrong: list[str]
) -> None:
    found = {
        of(n): Run("survived" if n in survivors else "timeout" if n == 3 else "killed")
        for n in range(15)
    }
    lines, is_right = report(found, {of(n).name: "why" for n in listed}, whole=True)
    killed = f"{15 - len(survivors):3} of  15 killed"
    assert lines == [f"{'predict':12} {killed}", f"{'all':12} {killed}", *wrong]
    assert is_right == (not wrong)
