"""What the demo takes for wrong in the results of `bench --compare`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from flying_serving.bench.once import SUMMARY, SWITCHES
from flying_serving.bench.plan import parse_plan, workload_of
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


def test_a_missing_log_of_switches_is_wrong(tmp_path: Path) -> None:
    (results(tmp_path, failed=1) / SWITCHES).unlink()
    assert traffic.problems(tmp_path) == ["1 requests failed", "there is no log of its switches"]


def test_the_workload_is_a_burst_between_two_quiet_phases(tmp_path: Path) -> None:
    """The options are those that `bench` takes; the burst has several times the rate of the quiet phases."""
    line = traffic.words(tmp_path / "model", tmp_path / "out")
    options = dict(zip(line[1 : line.index("--") : 2], line[2 : line.index("--") : 2], strict=True))
    parameters = [value for name, value in itertools.pairwise(line) if name == "--set"]
    plan = parse_plan(
        {
            "url": "",
            "compare": options["--compare"],
            "synth": options["--synth"],
            "seed": int(options["--seed"]),
            "parameters": parameters,
            "token_ids": options["--token-ids"],
            "out": Path(options["--out"]),
            "server": line[line.index("--") + 1 :],
        }
    )
    assert plan.compare == traffic.POLICIES
    assert plan.server is not None and plan.server.engines == 4
    phases = [(phase, list(group)) for phase, group in itertools.groupby(workload_of(plan).requests, lambda r: r.phase)]
    assert [phase for phase, _ in phases] == ["low", "burst", "low"]
    before, burst, after = (len(group) for _, group in phases)
    assert burst / 10 > 3 * max(before, after) / 15


def test_no_results_are_wrong(tmp_path: Path) -> None:
    assert traffic.problems(tmp_path) == ["there are no results"]
