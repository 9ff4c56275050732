"""The row of an engine: its own steps, steps of groups, and orders."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from flying_serving.engine.messages import RunStep
from flying_serving.engine.tracing import EngineTrace
from flying_serving.layout.groups import KVSource
from flying_serving.migration.messages import PullKV
from flying_serving.observe.tracing import file as trace_file
from flying_serving.parallelism import Parallelism
from tests.unit.observe.tracing.reading import Event, of_row, read_trace, rows
from tests.with_vllm.engine.schedulers import FakeScheduler, Hooks

PARALLELISM = {2: Parallelism.TOKEN, 4: Parallelism.TENSOR}
"""Of the steps of groups, by size."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the path of a trace that was begun."""
    ends: list[Any] = []
    monkeypatch.setattr(trace_file.atexit, "register", lambda _call, *args: ends.append(args))
    path = tmp_path / "trace.json"
    trace_file.begin_trace(str(path))
    yield path
    trace_file._end(*ends.pop())


def trace_of(path: Path, scheduler: FakeScheduler) -> EngineTrace:
    """Return the trace of an engine whose lane 1 has this scheduler."""
    trace = EngineTrace(str(path), 3)
    scheduler.hooks = Hooks(output_received=trace.received)
    return trace


def step(scheduler: Any) -> SchedulerOutput:
    """Let a scheduler make a step."""
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, "output")
    return plan


def written(path: Path, trace: EngineTrace, kind: str) -> list[Event]:
    """Close a trace and return the events of its row."""
    trace.close()
    events = read_trace(path)
    assert rows(events)["engine 3"] == (os.getppid(), os.getpid())
    return of_row(events, (os.getppid(), os.getpid()), kind)


def test_a_request_from_its_prompt_to_its_last_token(path: Path) -> None:
    """A prompt in chunks, then one token a step; what computes nothing is no step."""
    scheduler = FakeScheduler(20, budget=8)
    trace = trace_of(path, scheduler)
    scheduler.add("a", prompt=10, max_tokens=3)
    for number in range(6):
        step(scheduler)
        trace.stepped(1, None, number, number + 0.5, waited_s=0.0)
    spans = written(path, trace, "step")
    keys = ("tokens", "requests", "prefill_tokens", "context_tokens")
    assert [tuple(span["args"][key] for key in keys) for span in spans] == [
        (8, 1, 8, 0),
        (2, 1, 2, 8),
        (1, 1, 0, 10),
        (1, 1, 0, 11),
    ]
    assert [span["args"]["step"] for span in spans] == [1, 2, 3, 4]
    assert {(span["name"], span["dur"]) for span in spans} == {("alone", 500_000)}


def test_a_turn_without_an_output_is_no_step(path: Path) -> None:
    """With async scheduling: the plan counts where its output comes."""
    scheduler = FakeScheduler(20)
    trace = trace_of(path, scheduler)
    scheduler.add("a", prompt=4, max_tokens=3)
    plan = scheduler.schedule()
    trace.stepped(1, None, 1.0, 1.5, waited_s=0.0)
    scheduler.update_from_output(plan, "output")
    trace.stepped(1, None, 2.0, 2.5, waited_s=0.0)
    trace.stepped(1, None, 3.0, 3.5, waited_s=0.0)
    assert [span["ts"] for span in written(path, trace, "step")] == [2_000_000]


def test_steps_of_groups_are_counted_by_lane(path: Path) -> None:
    """A member has the plan from the message; the plan of lane 1 stays lane 1's."""
    own, leader = FakeScheduler(20), FakeScheduler(20)
    trace = trace_of(path, own)
    own.add("a", prompt=4, max_tokens=2)
    leader.add("b", prompt=6, max_tokens=2)
    step(own)
    for began_s, size in ((1.0, 2), (2.0, 4)):
        order = RunStep((0, 1), step(leader), None, False, parallelism=PARALLELISM[size])
        trace.stepped(size, order, began_s, began_s + 1, waited_s=0.25)
    trace.stepped(1, None, 3.0, 4.0, waited_s=0.0)
    nothing = RunStep((0, 1), SchedulerOutput.make_empty(), None, False)
    trace.stepped(2, nothing, 4.0, 5.0, waited_s=0.0)
    spans = written(path, trace, "step")
    assert [(span["name"], span["args"]["step"], span["args"]["tokens"]) for span in spans] == [
        ("group 2,3", 1, 6),
        ("group 0,1,2,3", 1, 1),
        ("alone", 1, 4),
    ]
    assert [span["args"]["parallelism"] for span in spans] == ["token", "tensor", "tensor"]
    assert [span["args"]["waited_ms"] for span in spans] == [250.0, 250.0, 0.0]


def test_orders(path: Path) -> None:
    """An instant in the row of the engine that has taken it."""
    trace = EngineTrace(str(path), 3)
    trace.ordered([2, 3], "hard", 5.0)
    (event,) = written(path, trace, "order")
    assert event["name"] == "to 2,3"
    assert event["ph"] == "i"
    assert event["ts"] == 5_000_000
    assert event["args"] == {"group": [2, 3], "mode": "hard"}


def test_a_pull_is_a_span_with_where_its_kv_came_from(path: Path) -> None:
    """It lasts as long as the engine copies."""
    trace = EngineTrace(str(path), 3)
    message = PullKV((3,), "a", KVSource((0, 1), 7), [1], [2], range(16, 40))
    with trace.pulling(lambda: 9, message):
        pass
    (span,) = written(path, trace, "pull")
    assert span["name"] == "pull from 0,1"
    assert span["args"] == {"source": [0, 1], "first_token": 16, "tokens": 24, "blocks_in_use": 9}
