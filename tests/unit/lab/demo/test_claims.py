"""The claims that docs/benchmarks.md makes of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from flying_lab.demo import claims
from flying_lab.demo.claims import AIM, CLAIMS, Observed, way
from tests.unit.lab.demo.figures import AFTER, BURST, PHASES, QUIET, phase

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("claim", (*CLAIMS, AIM), ids=lambda claim: claim.words)
def test_benchmarks_have_each_claim_and_the_aim_in_the_same_words(claim: claims.Claim) -> None:
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    assert claim.words in page


def test_all_claims_hold_where_auto_is_near_the_better_layout() -> None:
    assert claims.problems(Observed(PHASES, 1)) == []


def test_no_switch_is_a_missed_claim() -> None:
    (problem,) = claims.problems(Observed(PHASES, 0))
    assert problem.endswith("0 switches, not 1 or more")


def test_a_layout_that_is_never_the_better_one_is_a_missed_claim() -> None:
    (problem,) = claims.problems(Observed((QUIET, AFTER), 1))
    assert problem.endswith("engines apart are the better layout in no phase")


@pytest.mark.parametrize(("auto_ms", "outcome"), [(4800.0, "reached"), (4801.0, "missed")])
def test_the_aim_is_missed_beyond_half_of_the_way(auto_ms: float, outcome: str) -> None:
    burst = phase("burst", (4000.0, 5600.0, auto_ms))
    assert outcome in claims.aim_line(Observed((QUIET, burst, AFTER), 2))


def test_a_missed_aim_names_the_phase_and_all_means() -> None:
    burst = phase("burst", (4000.0, 5600.0, 5000.0))
    line = claims.aim_line(Observed((QUIET, burst, AFTER), 2))
    assert line.endswith("burst: engines apart 4000 ms, engines together 5600 ms, auto 5000 ms")


@pytest.mark.parametrize(("figures", "expected"), [(QUIET, 0.25), (BURST, 0.25), (AFTER, -0.1)])
def test_the_way_is_0_at_the_better_layout_and_1_at_the_other(
    figures: claims.PhaseFigures, expected: float
) -> None:
    assert way(figures) == pytest.approx(expected)
