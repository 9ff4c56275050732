"""What the demo's first part shows of switches, and what it takes for wrong."""

from __future__ import annotations

import io

from rich.console import Console

from flying_lab.demo import layouts
from flying_lab.demo.__main__ import COLUMNS
from flying_lab.demo.server import layout_of

RECORDS = [
    {
        "from": layout_of(1),
        "to": layout_of(2),
        "mode": mode,
        "requests_in_flight": 3,
        "drain_ms": 900.0,
    }
    | {"cutover_ms": cutover_ms, "worst_token_gap_ms": gap_ms}
    for mode, cutover_ms, gap_ms in (("weave", 15.2, 119.8), ("hard", 14.9, 1050.6))
]


def test_the_switches_of_an_operator_fit_the_columns() -> None:
    shown = io.StringIO()
    Console(width=COLUMNS, file=shown).print(layouts.switch_table(RECORDS))
    assert max(map(len, shown.getvalue().splitlines())) <= COLUMNS
    assert "…" not in shown.getvalue()


def test_first_part_ends_with_the_effect_of_switches_on_streams() -> None:
    text = layouts.conclusion(RECORDS)
    assert "the layout changed 2 times while requests streamed, each time within 15 ms" in text
    assert text.endswith(
        "No stream stood still for longer than 0.12 s with mode weave, 1.05 s with mode hard."
    )


def test_a_plan_that_was_carried_out_has_no_problem() -> None:
    records = [{"number": 1, "cutover_ms": 1.0, "drain_ms": 2.0} for _ in layouts.PLAN]
    assert layouts.unmade(records) == []


def test_a_switch_without_a_drain_time_is_wrong() -> None:
    records = [{"number": 1, "cutover_ms": 1.0, "drain_ms": 2.0} for _ in layouts.PLAN]
    records[0] = {"number": 7, "cutover_ms": 1.0, "drain_ms": None}
    assert layouts.unmade(records) == ["switch 7 has no drain_ms"]


def test_a_missing_switch_is_wrong() -> None:
    (problem,) = layouts.unmade([])
    assert problem == f"0 switches recorded, {len(layouts.PLAN)} made"
