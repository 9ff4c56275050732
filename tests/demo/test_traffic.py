"""What the demo takes for wrong in the results of `bench --compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flying_serving.bench.once import SUMMARY, SWITCHES
from flying_serving.demo import traffic


def results(path: Path, problem: str | None = None, **counts: int) -> Path:
    """Results of one system, as `bench` writes them."""
    (path / SUMMARY).write_text(json.dumps({"failed": 0, "unfinished": 0, **counts}))
    (path / SWITCHES).write_text(json.dumps({"switches": [{"number": 3, "problem": problem}]}))
    return path


def test_results_without_failures_are_right(tmp_path: Path) -> None:
    assert traffic.problems(results(tmp_path)) == []


@pytest.mark.parametrize("what", ["failed", "unfinished"])
def test_requests_that_did_not_complete_are_wrong(tmp_path: Path, what: str) -> None:
    assert traffic.problems(results(tmp_path, **{what: 2})) == [f"2 requests {what}"]


def test_a_switch_that_failed_is_wrong(tmp_path: Path) -> None:
    assert traffic.problems(results(tmp_path, "engine 1 did not answer")) == ["switch 3: engine 1 did not answer"]


def test_no_results_are_wrong(tmp_path: Path) -> None:
    assert traffic.problems(tmp_path) == ["there are no results"]
