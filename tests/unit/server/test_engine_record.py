"""Phases of an engine: each follows another as the table says, and says whether a process
serves.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.server.engine_record import (
    IS_KILLED,
    IS_READY,
    TRANSITIONS,
    EnginePhase,
    EngineRecord,
    incarnations,
)

A_LOSS_AND_RETURN = (
    EnginePhase.KILLED,
    EnginePhase.LOST,
    EnginePhase.STARTING,
    EnginePhase.JOINING,
    EnginePhase.UP,
)
FORBIDDEN = [
    (phase, other)
    for phase in EnginePhase
    for other in EnginePhase
    if other not in TRANSITIONS[phase]
]


def record(phase: EnginePhase = EnginePhase.UP, **fields: Any) -> EngineRecord:
    """Return the record of an engine in a phase, whose process counts how often it is killed."""
    process = SimpleNamespace(sentinel=7, exitcode=None, kills=0)
    process.kill = lambda: setattr(process, "kills", process.kills + 1)
    found = EngineRecord(0, phase, **fields)
    found.process = process  # type: ignore[assignment]
    return found


def test_a_loss_and_return_go_through_the_phases_in_order() -> None:
    engine = record()
    for phase in A_LOSS_AND_RETURN:
        engine.enter(phase)
    assert engine.phase is EnginePhase.UP


@pytest.mark.parametrize(("phase", "other"), FORBIDDEN)
def test_a_phase_that_cannot_follow_is_an_error(phase: EnginePhase, other: EnginePhase) -> None:
    engine = record(phase)
    with pytest.raises(RuntimeError, match=f"an engine: from {phase.value} to {other.value}"):
        engine.enter(other)
    assert engine.phase is phase


@pytest.mark.parametrize("phase", EnginePhase)
def test_every_phase_leads_back_to_up(phase: EnginePhase) -> None:
    reached = {phase}
    for _ in EnginePhase:
        reached |= {following for before in reached for following in TRANSITIONS[before]}
    assert EnginePhase.UP in reached


@pytest.mark.parametrize("table", [IS_KILLED, IS_READY], ids=["killed", "ready"])
def test_every_step_of_a_table_is_one_that_may_follow(
    table: dict[EnginePhase, EnginePhase],
) -> None:
    assert [
        phase for phase, following in table.items() if following not in TRANSITIONS[phase]
    ] == []


@pytest.mark.parametrize("phase", IS_KILLED)
def test_a_kill_ends_the_process_and_notes_the_reason(phase: EnginePhase) -> None:
    engine = record(phase)
    engine.kill("it was silent")
    assert engine.process.kills == 1  # type: ignore[attr-defined]
    assert engine.kill_reason == "it was silent"
    assert not engine.can_be_killed


@pytest.mark.parametrize("phase", IS_KILLED)
def test_a_kill_does_not_change_whether_a_process_serves(phase: EnginePhase) -> None:
    """The requests of a killed engine run elsewhere only when its process has ended."""
    engine = record(phase)
    served = engine.serves
    engine.kill("it was silent")
    assert engine.serves is served


def test_incarnations_of_engines_without_a_process_that_serves_are_none() -> None:
    engines = [record(phase, incarnation=number) for number, phase in enumerate(EnginePhase)]
    assert incarnations(engines) == [0, 1, None, None, None, 5]


def test_engines_that_end_or_have_ended_hold_memory() -> None:
    holding = {phase for phase in EnginePhase if record(phase).holds_memory}
    assert holding == set(EnginePhase) - {EnginePhase.UP, EnginePhase.JOINING}
