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


ROLES = {"2+2": ("member", "owner"), "2+1+1": ("leader",)}
"""Those that are killed, by layout; the first layout has only groups of two."""


def some_cases(layout: str) -> list[Case]:
    """Six phases; and a freeze in groups of two."""
    kills = [case for case in cases(KILLS, (layout,), ("kill",), 1) if case.role in ROLES[layout]]
    return kills + (list(cases(FREEZES, (layout,), ("freeze",), 1)) if layout == "2+2" else [])


def with_second_tries(first: list[Case], outcomes: list[Outcome]) -> Iterator[Case]:
    """All cases; then once more those of phases that none of them has reached."""
    yield from first
    reached = phases(outcomes)
    yield from (case for case in first if case.phase not in reached)


def phases(outcomes: list[Outcome]) -> set[str]:
    """Return the phases that were reached."""
    return {outcome.case.phase for outcome in outcomes if NOT_REACHED not in outcome.problems}


@pytest.mark.parametrize("layout", ROLES)
def test_streams_survive_engines_that_are_lost(tmp_path: Path, layout: str) -> None:
    first, outcomes = some_cases(layout), list[Outcome]()
    with trapped(tmp_path, TIMEOUT_S, TIGHT) as server:
        asyncio.run(chaos(server, tmp_path, with_second_tries(first, outcomes), outcomes))
    print_outcomes(outcomes)
    # whether one case reaches its phase depends on the load, so a quarter need not
    reached = [outcome for outcome in outcomes if NOT_REACHED not in outcome.problems]
    assert not [(outcome.case.name, outcome.problems) for outcome in reached if outcome.problems]
    assert len(outcomes) >= len(first)
    assert len({outcome.case.name for outcome in reached}) >= len(first) * 3 // 4
    assert sum(bool(outcome.orphaned_s) for outcome in reached) >= len(first) // 2
    if layout == "2+2":
        assert phases(outcomes) == {*KILLS, *FREEZES}, "a phase that nothing reaches any more"
