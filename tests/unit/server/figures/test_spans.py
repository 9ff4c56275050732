"""Switches in a trace: those of the records, each once, however often one looks."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.switches import KEPT, OpenSwitch, Switch, Switches
from flying_serving.layout.groups import Layout
from flying_serving.observe.tracing import file as trace_file
from flying_serving.observe.tracing.events import server_row
from flying_serving.server.figures.spans import news, trace_switches
from flying_serving.server.figures.switches import SwitchFollower
from flying_serving.wire import SwitchAnswer
from tests.unit.observe.tracing.reading import Event, check, overlaps, read_trace

LAYOUTS = [Layout.uniform(4, size) for size in (1, 2, 4)]
STEPS = st.sampled_from(["order", "acknowledge", "fail", "end", "look", "look"])


@dataclass
class Played:
    """Switches of a server, as a controller has them; one under way at a time, older ones may
    drain.
    """

    switches: Switches = field(default_factory=Switches)
    follower: SwitchFollower = field(default_factory=SwitchFollower)
    events: list[Event] = field(default_factory=list)
    all: list[Switch] = field(default_factory=list)
    under_way: OpenSwitch | None = None
    now_s: float = 100.0

    def play(self, step: str, after_s: float) -> None:
        """One thing happens, some time after the last."""
        self.now_s += after_s
        if step == "order" and self.under_way is None:
            count = self.switches.count
            old, new = LAYOUTS[count % 3], LAYOUTS[(count + 1) % 3]
            draining = {f"r{count}"} if count % 2 else set()
            switch = Switch(old, new, "weave", self.now_s, len(draining))
            self.under_way = OpenSwitch(switch, draining, 1, "weave")
            self.switches.begin(self.under_way)
            self.all.append(switch)
        elif step == "acknowledge" and self.under_way is not None:
            took_ms = (self.now_s - self.under_way.switch.ordered_s) * 1e3
            self.under_way.acknowledged([SwitchAnswer(took_ms, 0.0, 0.1)], self.now_s)
            self.under_way = None
        elif step == "fail" and self.under_way is not None:
            self.under_way.failed("engine 1 did not answer", self.now_s)
            self.under_way = None
        elif step == "end":
            for switch in self.all:
                self.switches.ended(f"r{switch.number - 1}", self.now_s)
        elif step == "look":
            self.events += news(server_row(100), self.follower, self.switches)
        self.switches.prune()


@given(steps=st.lists(st.tuples(STEPS, st.floats(min_value=0, max_value=5)), max_size=40))
def test_each_switch_is_shown_once_as_its_record_says(steps: list[tuple[str, float]]) -> None:
    """Whenever one looks: one begin, one cutover unless it failed, one end if it is over."""
    played = Played()
    for step, after_s in steps:
        played.play(step, after_s)
    played.play("look", 0.0)
    for event in played.events:
        check(event)
    cutovers = [event for event in played.events if event["ph"] == "X"]
    assert overlaps(cutovers) == []
    for switch in played.all:
        own = [
            event
            for event in played.events
            if event.get("id", str(event["args"].get("number"))) == str(switch.number)
        ]
        shown = {phase: [event for event in own if event["ph"] == phase] for phase in "bXe"}
        known = played.under_way is None or switch is not played.under_way.switch
        assert [len(shown[phase]) for phase in "bXe"] == [
            known,
            switch.cutover_ms is not None,
            not switch.open,
        ]
        if known:
            assert shown["b"][0]["ts"] == pytest.approx(switch.ordered_s * 1e6, abs=1)
        if not switch.open:
            record = switch.to_json()
            assert shown["b"][0]["args"] | shown["e"][0]["args"] == record
            assert shown["e"][0]["ts"] - shown["b"][0]["ts"] == pytest.approx(
                record["drain_ms"] * 1e3, abs=1
            )
        if switch.cutover_ms is not None:
            assert shown["X"][0]["dur"] == pytest.approx(switch.cutover_ms * 1e3, abs=1)
            assert shown["X"][0]["name"] == f"{switch.old} -> {switch.new}"


def test_more_switches_than_are_kept() -> None:
    """What was shown is not shown again when the oldest records go."""
    played = Played()
    for _ in range(KEPT + 100):
        for step in ("order", "acknowledge", "look"):
            played.play(step, 0.01)
    assert [event["args"]["number"] for event in played.events if event["ph"] == "b"] == list(
        range(1, KEPT + 101)
    )


@pytest.mark.parametrize("fails", [False, True])
def test_last_events_are_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Though nobody looked any more, and the server may end by an error."""
    ends: list[Any] = []
    monkeypatch.setattr(trace_file.atexit, "register", lambda _call, *args: ends.append(args))
    path = tmp_path / "trace.json"
    trace_file.begin_trace(str(path))
    played = Played()

    def serve() -> None:
        with trace_switches(str(path), played.switches) as note:
            played.play("order", 1.0)
            note()
            played.play("acknowledge", 1.0)
            if fails:
                raise RuntimeError("the server fails")

    if fails:
        with pytest.raises(RuntimeError, match="the server fails"):
            serve()
    else:
        serve()
    trace_file._end(*ends.pop())
    assert [
        event["ph"] for event in read_trace(path) if event.get("cat") in ("switch", "cutover")
    ] == ["b", "X", "e"]


def test_no_trace_is_written_without_a_path(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    with trace_switches(None, Switches()) as note:
        note()
    assert set(tmp_path.iterdir()) == before
    assert os.listdir(tmp_path) == []
