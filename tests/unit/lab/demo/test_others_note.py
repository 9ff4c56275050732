"""The demo's note on other programs that are at work."""

from __future__ import annotations

import pytest

from flying_lab.demo.__main__ import others_note
from tests.unit.placement.machines import machine


@pytest.mark.parametrize(
    ("percents", "cores", "used"),
    [([50.0, 50.0], 2, "1.0 of 2 CPUs"), ([20.0] * 8, 8, "1.6 of 8 CPUs")],
)
def test_other_programs_that_are_at_work_are_told(
    percents: list[float], cores: int, used: str
) -> None:
    assert used in (others_note(percents, machine(cores)) or "")


def test_other_programs_on_cpus_that_the_demo_may_not_use_are_not_told() -> None:
    assert others_note([5.0, 5.0, 100.0, 100.0], machine(2)) is None


def test_a_quiet_machine_is_not_worth_a_note() -> None:
    assert others_note([5.0, 5.0], machine(2)) is None
