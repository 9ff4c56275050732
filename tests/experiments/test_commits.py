"""Commits that pages and their numbers name are in the history, with the dates that the pages
give.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import live
from experiments.__main__ import ALL
from experiments.common import RESULTS, ROOT, kept

COMMIT = re.compile(
    r"(?<![0-9a-zA-Z.,_/-])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}(?![0-9a-zA-Z_-])"
)
"""Seven hex digits, letters and numbers among them."""
MADE = re.compile(r"^- `make experiments ARGS=(\w+)` at commit ([0-9a-f]{7}) ", re.M)
LOST = live.read()[1]


def _git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def whole_history() -> None:
    """A commit that a shallow clone lacks may exist."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    assert shallow.stdout.strip() == "false", (
        "whether commits exist needs the whole history: run `git fetch --unshallow` "
        f"({shallow.stderr.strip()})"
    )


def in_history(commit: str) -> bool:
    """Whether it is an ancestor of what is checked out."""
    return _git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def named() -> Iterator[tuple[str, str]]:
    """(commit, where) of every page of results, README and docs/."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for commit in sorted(set(COMMIT.findall(path.read_text(encoding="utf-8")))):
            yield commit, path.relative_to(ROOT).as_posix()


def test_every_commit_that_a_page_names_is_in_the_history_or_lost() -> None:
    found = list(named())
    assert len(found) > 50
    assert not [
        f"{where}: {commit}"
        for commit, where in found
        if commit not in LOST and not in_history(commit)
    ]


@pytest.mark.parametrize("commit", LOST)
def test_a_lost_commit_is_not_in_the_history_and_the_page_says_so(commit: str) -> None:
    assert not in_history(commit)
    assert f"{commit} (not in the history" in " ".join(live.page().split())


@pytest.mark.parametrize("name", ALL)
def test_kept_numbers_are_of_a_commit_of_the_history_and_its_date(name: str) -> None:
    found = kept(name)
    assert re.fullmatch(r"[0-9a-f]{7}", found.commit)
    assert in_history(found.commit)
    assert (
        _git("log", "-1", "--format=%ad", "--date=short", found.commit).stdout.strip() == found.date
    )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_command_of_a_page_exists_at_its_commit(path: Path) -> None:
    """An experiment may have had another name then."""
    for name, commit in MADE.findall(path.read_text(encoding="utf-8")):
        assert f'"{name}"' in _git("show", f"{commit}:experiments/__main__.py").stdout, (
            name,
            commit,
        )


def test_live_runs_give_each_commit_its_date() -> None:
    commits = {one for run in live.read()[0].values() for one in run.commits if one[0] not in LOST}
    dates = {
        commit: _git("log", "-1", "--format=%ad", "--date=short", commit).stdout.strip()
        for commit, _ in commits
    }
    assert sorted(commits) == sorted(dates.items())


def test_cost_model_page_names_a_commit_that_finds_it_again() -> None:
    text = (RESULTS / "cost_model.md").read_text(encoding="utf-8")
    assert all(in_history(commit) for commit in COMMIT.findall(text))


@pytest.mark.parametrize(
    ("text", "found"), [("at 66f2b3f;", ["66f2b3f"]), ("1,048576 tokens, 1234567", [])]
)
def test_seven_hex_digits_with_letters_are_taken_for_a_commit(text: str, found: list[str]) -> None:
    assert COMMIT.findall(text) == found


@pytest.mark.parametrize("commit", ["66f2b3f", "0000000"])
def test_a_commit_that_does_not_exist_is_not_in_the_history(commit: str) -> None:
    assert not in_history(commit)
