"""What comparisons of live servers share: turns, phases, capacity, figures and kept rows."""

from pathlib import Path

import pytest

from benchmarks.live_report import FIGURES, read
from benchmarks.rounds import (
    Rows,
    add,
    begun,
    keep,
    middle_rate_rps,
    phased,
    rotated,
    steady,
    values_of,
)
from flying_lab.workload.synth import Alternating

NAMES = ["a", "b", "c"]


def summary(ttft_ms: float | None) -> dict[str, object]:
    """Return a summary with one phase, of whose two requests one was served."""
    part = {"completed": 1, "num_prompts": 2, **dict.fromkeys(FIGURES, 8.0)}
    low = part | {"mean_ttft_ms": ttft_ms}
    counts = {"switches": 3, "failed": 1, "unfinished": 0, "output_throughput": 60.0}
    return part | {"phases": {"low": low}} | counts


def test_in_as_many_rounds_as_systems_each_is_first_once() -> None:
    assert [rotated(NAMES, number)[0] for number in range(4)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("number", range(4))
def test_a_round_has_each_system_once(number: int) -> None:
    assert sorted(rotated(NAMES, number)) == NAMES


def test_only_low_requests_of_the_first_seconds_after_a_burst_are_after_it() -> None:
    made = phased(
        Alternating(duration_s=200, low_rate_rps=2, burst_rate_rps=4, low_s=100, burst_s=40), 1
    )
    spans = {"low": [(0, 100), (160, 200)], "burst": [(100, 140)], "after": [(140, 160)]}
    wrong = [
        request
        for request in made.requests
        if not any(a <= request.arrival_s < b for a, b in spans[request.phase or ""])
    ]
    assert {request.phase for request in made.requests} == set(spans)
    assert not wrong


def test_a_steady_load_is_one_phase() -> None:
    lengths = {"prompt_tokens": (1, 2), "output_tokens": (3, 4)}
    assert {r.phase for r in steady(5.0, 10.0, lengths, 1, "quiet").requests} == {"quiet"}


def test_the_capacity_is_the_rate_of_the_middle_ends() -> None:
    ends_s = [0.0, 0.1, 2.0, 2.5, 3.0, 3.5, 4.0, 90.0, 95.0, 99.0]
    assert middle_rate_rps(ends_s) == pytest.approx(4 / 2.0)


def test_a_capacity_of_too_few_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        middle_rate_rps([1.0] * 4)


def test_latencies_are_in_the_devices_time() -> None:
    found = {(phase, figure): value for phase, figure, value in values_of(summary(6.0), 2.0)}
    assert found["low", "mean_ttft_ms"] == 3.0


def test_shares_and_counts_are_not_divided_by_the_slowdown() -> None:
    found = {(phase, figure): value for phase, figure, value in values_of(summary(6.0), 2.0)}
    assert found["low", "completed"] == 0.5
    assert found["all", "switches"] == 3.0
    assert found["all", "not completed"] == 1.0


def test_a_figure_without_completed_requests_has_no_value() -> None:
    assert ("low", "mean_ttft_ms") not in {
        (phase, name) for phase, name, _ in values_of(summary(None))
    }


def test_kept_rows_have_the_values_of_all_rounds(tmp_path: Path) -> None:
    rows: Rows = {}
    for ttft_ms in (4.0, 5.0):
        add(rows, "auto", summary(ttft_ms))
    keep(tmp_path / "rows.json", {"rounds": 2, "out": tmp_path}, rows)
    kept = read(tmp_path / "rows.json")
    assert kept["settings"] == {"rounds": 2}
    row = next(row for row in kept["rows"] if row["figure"] == "mean_ttft_ms")
    assert row["values"] == [4.0, 5.0]


def test_the_requests_of_a_part_of_a_run_have_a_phase_of_their_own() -> None:
    names = {phase for phase, _, _ in values_of(summary(6.0), whole="0.4, all")}
    assert names == {"low", "0.4, all"}


def test_a_round_has_begun_with_its_first_system() -> None:
    rows: Rows = {}
    for name in ("auto", "load", "load"):
        add(rows, name, summary(4.0))
    assert begun(rows) == 2
