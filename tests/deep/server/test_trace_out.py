"""`--trace-out` on a live server: what is in the file is what the engines and the switches did."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.live import Server
from harness.streams import Stream, begin, streamed_body
from tests.stock.requests import tokens
from tests.unit.observe.tracing.reading import Event, end, of_row, overlaps, read_trace, rows

pytestmark = pytest.mark.server

ALONE, TOGETHER = [[0], [1]], [[0, 1]]
PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 40, 120, 4
ORDERS = ((TOGETHER, "weave"), (ALONE, "hard"), (TOGETHER, "sequential"))
END_S = 60.0


@dataclass(frozen=True)
class Traced:
    """A trace of a server that has ended, what it was while the server ran, and what the server
    said of itself.
    """

    running: list[Event]
    events: list[Event]
    switches: list[dict[str, Any]]
    streams: list[Stream]
    server_pid: int

    def row(self, name: str, kind: str) -> list[Event]:
        """Return the events of one kind in a row."""
        return of_row(self.events, rows(self.events)[name], kind)

    def steps(self, engine: int, lane: int) -> dict[int, Event]:
        """Return an engine's steps in a lane, by number."""
        found = [
            step for step in self.row(f"engine {engine}", "step") if step["args"]["lane"] == lane
        ]
        assert [step["args"]["step"] for step in found] == list(range(1, len(found) + 1))
        return {step["args"]["step"]: step for step in found}


async def traffic(server: Server) -> list[Stream]:
    """Requests in both layouts, with a merge and a split while the last ones stream."""
    fields = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    bodies = [
        streamed_body(server.model, tokens(i, PROMPT_TOKENS), **fields) for i in range(4 * STREAMS)
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=END_S) as http:
        _, tasks = await begin(http, bodies[:STREAMS])
        # no switch moves a stream that has not begun
        for number, (groups, mode) in enumerate(ORDERS, start=1):
            (
                await http.post("/flying/layout", json={"groups": groups, "mode": mode})
            ).raise_for_status()
            tasks += (await begin(http, bodies[number * STREAMS :][:STREAMS]))[1]
        return await asyncio.wait_for(asyncio.gather(*tasks), END_S)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Two engines, sixteen requests, three switches; then the server ends as it should.

    An engine writes the rest of its trace first of all. Where others have the cores, the collection
    of its garbage after that may take longer than the 5 s that vLLM gives it.
    """
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with Server("llama", 2, f"--trace-out={path}") as server:
        streams = asyncio.run(traffic(server))
        switches = server.switches()
        running = read_trace(path)
        server.process.terminate()
        assert server.process.wait(END_S) == 0
    yield Traced(running, closed(path), switches, streams, server.process.pid)


def closed(path: Path) -> list[Event]:
    """Return the events of a trace that was ended: JSON as it stands."""
    assert json.loads(path.read_text()) == read_trace(path)
    return read_trace(path)


def test_a_row_for_the_server_and_for_each_engine(traced: Traced) -> None:
    """In the frame of the server's process, each with the number of its own."""
    found = rows(traced.events)
    assert sorted(found) == ["engine 0", "engine 1", "switches"]
    assert found["switches"] == (traced.server_pid, traced.server_pid)
    assert {pid for pid, _ in found.values()} == {traced.server_pid}
    assert len({tid for _, tid in found.values()}) == 3


def test_the_file_can_be_read_while_the_server_runs(traced: Traced) -> None:
    """It is what a kill would leave: the same events, without the last ones and the bracket."""
    left = [json.dumps(event) for event in traced.running]
    assert left == [json.dumps(event) for event in traced.events[: len(left)]]
    assert set(rows(traced.running)) == set(rows(traced.events))
    assert len([event for event in traced.running if event["ph"] == "X"]) > 10


def test_an_engine_does_one_thing_at_a_time(traced: Traced) -> None:
    """Spans of a row do not overlap; nothing was lost."""
    for engine in (0, 1):
        spans = traced.row(f"engine {engine}", "step")
        assert len(spans) > OUTPUT_TOKENS
        assert overlaps(spans) == []
    assert overlaps(traced.row("switches", "cutover")) == []
    assert not [
        event for event in traced.events if event.get("cat") == "trace" and event["name"] != "clock"
    ]


def test_members_of_a_group_step_together(traced: Traced) -> None:
    """Each step of the group is in both rows, with the same contents, and at the same time."""
    leader, member = (traced.steps(engine, 2) for engine in (0, 1))
    assert len(leader) >= OUTPUT_TOKENS
    assert leader.keys() == member.keys()
    for number, ours in leader.items():
        theirs = member[number]
        assert ours["name"] == theirs["name"] == "group 0,1"
        assert max(ours["ts"], theirs["ts"]) < min(end(ours), end(theirs)), number
        same = ("group", "tokens", "requests", "prefill_tokens", "context_tokens")
        assert [ours["args"][key] for key in same] == [theirs["args"][key] for key in same]


def test_steps_have_computed_what_was_asked_for(traced: Traced) -> None:
    """All prompts, and every token that was given out but the last of each request, which nothing
    follows.
    """
    assert [len(stream.tokens) for stream in traced.streams] == [OUTPUT_TOKENS] * len(
        traced.streams
    )
    own_steps = [
        *traced.steps(0, 1).values(),
        *traced.steps(1, 1).values(),
        *traced.steps(0, 2).values(),
    ]
    requests = len(traced.streams)
    assert sum(step["args"]["prefill_tokens"] for step in own_steps) == requests * PROMPT_TOKENS
    assert sum(step["args"]["tokens"] for step in own_steps) == requests * (
        PROMPT_TOKENS + OUTPUT_TOKENS - 1
    )
    assert {step["name"] for step in own_steps} == {"alone", "group 0,1"}


def test_switches_are_those_of_the_admin_route(traced: Traced) -> None:
    """From the order to the end of the drain, with all that the record says; the cutover as a span
    of its own.
    """
    own = [event for event in traced.events if event.get("cat") == "switch"]
    began = {event["id"]: event for event in own if event["ph"] == "b"}
    ended = {event["id"]: event for event in own if event["ph"] == "e"}
    cutovers = {str(event["args"]["number"]): event for event in traced.row("switches", "cutover")}
    assert [record["mode"] for record in traced.switches] == [mode for _, mode in ORDERS]
    assert len(began) == len(ended) == len(cutovers) == len(traced.switches)
    clock = next(event for event in traced.events if event["name"] == "clock")
    for record in traced.switches:
        number = str(record["number"])
        assert began[number]["args"] | ended[number]["args"] == record
        drained_ms = (ended[number]["ts"] - began[number]["ts"]) / 1e3
        assert drained_ms == pytest.approx(max(record["drain_ms"], record["cutover_ms"]), abs=0.002)
        assert cutovers[number]["ts"] == began[number]["ts"]
        assert cutovers[number]["dur"] / 1e3 == pytest.approx(record["cutover_ms"], abs=0.002)
        unix_s = began[number]["ts"] / 1e6 + clock["args"]["unix_s_at_ts_0"]
        assert unix_s == pytest.approx(record["time"], abs=1.0)


def test_each_engine_shows_when_it_took_an_order(traced: Traced) -> None:
    """The last one to take it ends the cutover."""
    orders = [traced.row(f"engine {engine}", "order") for engine in (0, 1)]
    cutovers = traced.row("switches", "cutover")
    for index, record in enumerate(traced.switches):
        taken = [row[index] for row in orders]
        for engine, event in enumerate(taken):
            group = next(group for group in record["to"] if engine in group)
            assert event["args"] == {"group": group, "mode": record["mode"]}
            assert event["ts"] >= cutovers[index]["ts"]
        assert max(event["ts"] for event in taken) == pytest.approx(end(cutovers[index]), abs=2)
    assert [len(row) for row in orders] == [len(traced.switches)] * 2
