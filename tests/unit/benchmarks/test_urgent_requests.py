"""Rounds of urgent requests among others, with servers that answer at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import urgent_requests
from benchmarks.live_report import FIGURES
from flying_lab.workload.model import Workload

SHARES = (0.4, 0.7)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of two systems, whose requests are all served in 8 ms."""

    @contextmanager
    def served(name: str, *rest: object) -> Iterator[str]:
        yield name

    def replayed(system: str, workload: Workload) -> dict[str, object]:
        part = {"completed": 1, "num_prompts": 1, **dict.fromkeys(FIGURES, 8.0)}
        phases = {request.phase: part for request in workload.requests}
        counts = {"switches": 0, "failed": 0, "unfinished": 0, "output_throughput": 1.0}
        return part | {"phases": phases} | counts

    monkeypatch.setattr(urgent_requests, "served", served)
    monkeypatch.setattr(urgent_requests, "replayed", replayed)
    return ["--systems", "auto", "load", "--rounds", "2"]


def test_each_share_has_its_own_phases_with_one_value_for_each_round(args: list[str]) -> None:
    *_, rows = urgent_requests.run(urgent_requests.options(args))
    kinds = ("urgent", "others", "all")
    assert {phase for _, phase, _ in rows} == {f"{s:g}, {kind}" for s in SHARES for kind in kinds}
    assert {len(values) for values in rows.values()} == {2}


def test_rows_are_there_to_be_kept_after_each_system(args: list[str]) -> None:
    counts = [
        [
            len(rows[name, "0.7, all", "completed"])
            for name in ("auto", "load")
            if (name, "0.7, all", "completed") in rows
        ]
        for rows in urgent_requests.run(urgent_requests.options(args))
    ]
    assert counts == [[1], [1, 1], [1, 2], [2, 2]]
