"""Engines killed and frozen at named moments (benchmarks/chaos.py, in short): streams are what they
are undisturbed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import NOT_REACHED, TIGHT, chaos, trapped
from benchmarks.chaos_cases import Case, cases
from benchmarks.chaos_report import Outcome, print_outcomes

pytestmark = pytest.mark.server

KILLS = ("decode", "collective", "blocks reserved", "order sent", "pull half", "split after")
FREEZES = ("prefill",)
TIMEOUT_S = 3.0
"""Without a sign of life: other tests share the processors."""


def some_cases() -> list[Case]:
    """Six phases in two layouts, of which one has only groups of two; a freeze in each."""
    kills = [case for layout in ("2+2", "2+1+1") for case in cases(KILLS, (layout,), ("kill",), 1)]
    freezes = list(cases(FREEZES, ("2+2",), ("freeze",), 1))
    roles = {"2+2": ("member", "owner"), "2+1+1": ("leader",)}
    return [case for case in kills if case.role in roles[case.layout]] + freezes


def with_second_tries(outcomes: list[Outcome]) -> Iterator[Case]:
    """All cases; then once more those of phases that none of them has reached."""
    yield from some_cases()
    reached = phases(outcomes)
    yield from (case for case in some_cases() if case.phase not in reached)


def phases(outcomes: list[Outcome]) -> set[str]:
    """Return the phases that were reached."""
    return {outcome.case.phase for outcome in outcomes if NOT_REACHED not in outcome.problems}


def test_streams_survive_engines_that_are_lost(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    with trapped(tmp_path, TIMEOUT_S, TIGHT) as server:
        asyncio.run(chaos(server, tmp_path, with_second_tries(outcomes), outcomes))
    print_outcomes(outcomes)
    # whether one case does depends on the load, but not whether any of a phase does
    reached = [outcome for outcome in outcomes if NOT_REACHED not in outcome.problems]
    assert not [(outcome.case.name, outcome.problems) for outcome in reached if outcome.problems]
    assert phases(outcomes) == {*KILLS, *FREEZES}
    count = len(some_cases())
    assert len(outcomes) >= count and len(reached) >= count * 3 // 4
    assert sum(bool(outcome.orphaned_s) for outcome in reached) >= count // 2
