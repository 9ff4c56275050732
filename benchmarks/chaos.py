"""Engines killed and frozen at each named moment, under load: what is lost (nothing), and how long
everything takes.

`python -m benchmarks.chaos` starts a server of four engines on a tiny model and loses one engine
after another: in each phase, as leader, member and owner of KV that is pulled, in four layouts,
three times each. Streams with seeds run before, during and after; each is compared with the same
request undisturbed. It prints totals and every row that misses a bar; `--rows` names the file of
all rows. Exit code 1 if a request failed, a token is wrong or blocks do not add up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.chaos_cases import (
    AGAIN,
    BLOCKS,
    LAYOUTS,
    OTHERS,
    PHASES,
    SIGNALS,
    SPLITS,
    SWITCHING,
    Case,
    cases,
)
from benchmarks.chaos_report import Outcome, loss_rows, print_outcomes
from flying_lab.signals import ended_by_signals
from harness import both_ways, chaos_table
from harness.chaos_load import ChaosLoad, make_jobs
from harness.chaos_traps import EVENTS, PREAMBLE, TRAP, Trap
from harness.live import Server
from harness.storm_load import LONGEST_STEP

CROWD = {"1+1+1+1": 16, "2+2": 16, "4": 16, "2+1+1": 24}
"""Clients where lanes are to be short of blocks, by layout; else as many as may run at once when an
engine is lost. Where groups differ, the wide one has the most room.
"""
NOT_REACHED = "the phase was not reached"


class Room(NamedTuple):
    """What an engine has for KV, and how many requests of a group may run at once."""

    kv_bytes: int
    max_num_seqs: int


ROOMY, TIGHT = Room(16777216, 4), Room(4718592, 8)
"""128 blocks for few requests, so that clients keep all groups busy, wide ones too; or 36 for more
than those have room for, so that groups and lanes ask for each other's.
"""
FLAGS = (
    "--max-model-len=640",
    f"--max-num-batched-tokens={LONGEST_STEP}",
    "--lend-blocks=1",
)
SPRUNG_S = 30.0
"""How long a case may take to come to its phase."""
BACK_S = 30.0
BETWEEN_S = 0.05
"""Between two orders of a layout."""
FULL_S = 0.3
"""The same where lanes are to be short of blocks."""
SETTLED_S = 0.3
"""For which the load goes on when all engines are back."""


class Chaos:
    """One server that loses engines, case by case."""

    def __init__(self, server: Server, folder: Path, load: ChaosLoad) -> None:
        self._server = server
        self._folder = folder
        self._load = load
        self._http = load.http

    # ---- what the server says

    def _events(self, what: str) -> list[dict[str, Any]]:
        path = self._folder / EVENTS
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["what"] == what]

    async def _until(self, what: str, count: int, within_s: float) -> bool:
        """Whether an event has come so many times, within some time."""
        until_s = time.monotonic() + within_s
        while len(self._events(what)) < count:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self._http.get("/flying/status")).json()
        return found

    async def _order(self, layout: str, mode: str = "weave") -> httpx.Response:
        return await self._http.post(
            "/flying/layout", json={"groups": LAYOUTS[layout], "mode": mode}
        )

    async def _until_whole(self, layout: str) -> None:
        """All engines are there and work in the layout."""
        until_s = time.monotonic() + BACK_S
        while (answer := await self._order(layout)).status_code != 200:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{layout}: {answer.status_code} {answer.text}")
            await asyncio.sleep(0.05)

    # ---- one case

    async def run(self, case: Case) -> Outcome:
        """Lose an engine as the case says."""
        await self._until_whole(case.layout)
        (self._folder / EVENTS).unlink(missing_ok=True)
        pids = {engine["engine"]: engine["pid"] for engine in (await self._status())["engines"]}
        self._load.splits = case.phase in SPLITS
        clients = (
            CROWD[case.layout] if case.phase in BLOCKS else case.groups_left * ROOMY.max_num_seqs
        )
        if case.phase != "idle":
            self._load.start(clients)
            await self._load.until_streaming()
        sprung = await self._spring(case, pids[case.victim])
        if case.phase == "idle":
            self._load.start(clients)
        losses = 1 + (case.phase == AGAIN)
        back = sprung and await self._until("back", 1, BACK_S)
        await asyncio.sleep(SETTLED_S)
        await self._load.stop()
        outcome = Outcome(case, self._load.asked)
        if not sprung:
            outcome.problems.append(NOT_REACHED)
        elif not back:
            outcome.problems.append(f"the engine was not back within {BACK_S:g} s")
        else:
            outcome.measure(self._events, losses)
        outcome.problems += await self._integrity()
        return outcome

    async def _spring(self, case: Case, pid: int) -> bool:
        """Bring the engine to its phase; whether it has got the signal there."""
        number = SIGNALS[case.how]
        trap = Trap(case.phase, case.victim, number, case.skip, case.role == "owner", pid)
        if case.phase == AGAIN:
            Trap(AGAIN, case.victim, number).lay(self._folder)
        if case.phase in ("idle", AGAIN):
            self._note_sprung(case.victim)
            os.kill(pid, SIGNALS["kill"] if case.phase == AGAIN else number)
            return case.phase == "idle" or await self._until("sprung", 2, SPRUNG_S)
        trap.lay(self._folder)
        switching = asyncio.create_task(self._switch(case)) if case.phase in SWITCHING else None
        sprung = await self._until("sprung", 1, SPRUNG_S)
        if switching is not None:
            switching.cancel()
            await asyncio.gather(switching, return_exceptions=True)
        (self._folder / TRAP).unlink(missing_ok=True)
        return sprung

    def _note_sprung(self, victim: int) -> None:
        with (self._folder / EVENTS).open("a") as events:
            events.write(
                json.dumps({"what": "sprung", "engine": victim, "s": time.monotonic()}) + "\n"
            )

    async def _switch(self, case: Case) -> None:
        while True:
            for layout in (OTHERS[case.layout], case.layout):
                await self._order(layout, case.mode)
                await asyncio.sleep(FULL_S if case.phase in BLOCKS else BETWEEN_S)

    async def _integrity(self) -> list[str]:
        """Wait until nothing is left of any request; what does not add up then."""
        until_s = time.monotonic() + BACK_S
        while True:
            status = await self._status()
            lanes = [lane for engine in status["engines"] for lane in engine["lanes"].values()]
            left = sum(status["requests"].values()) + sum(
                lane["running"] + lane["waiting"] for lane in lanes
            )
            if not left and len(status["engines"]) == len(LAYOUTS["1+1+1+1"]):
                break
            if time.monotonic() > until_s:
                return [f"left when all streams had ended: {status}"]
            await asyncio.sleep(0.05)
        answer = await self._http.post("/flying/check", json={})
        return [] if answer.status_code == 200 else [f"blocks: {answer.text}"]


async def chaos(
    server: Server, folder: Path, which: Iterable[Case], outcomes: list[Outcome]
) -> None:
    """Run cases on one server, which has the traps of `folder`; what becomes of each is added to
    `outcomes`.
    """
    load = ChaosLoad(server, make_jobs())
    try:
        await load.learn()
        runner = Chaos(server, folder, load)
        for case in which:
            outcomes.append(await runner.run(case))
            print(outcomes[-1].line, flush=True)
    finally:
        await load.close()


def trapped(folder: Path, timeout_s: float, room: Room) -> Server:
    """A server of four engines with traps; one that gives no sign of life for `timeout_s` is
    lost.
    """
    limits = (f"--kv-cache-memory-bytes={room.kv_bytes}", f"--max-num-seqs={room.max_num_seqs}")
    flags = (*FLAGS, *limits, f"--engine-timeout-s={timeout_s}")
    preamble = f"{both_ways.PREAMBLE}\n{PREAMBLE.format(folder=str(folder))}"
    return Server("llama", 4, *flags, preamble=preamble)


def _run(
    which: list[Case], timeout_s: float, room: Room, outcomes: list[Outcome], log: Path | None
) -> None:
    with tempfile.TemporaryDirectory() as folder, trapped(Path(folder), timeout_s, room) as server:
        try:
            asyncio.run(chaos(server, Path(folder), which, outcomes))
        finally:
            if log is not None:
                with log.open("a") as said:
                    said.write(server.log())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=tuple(LAYOUTS))
    parser.add_argument("--how", nargs="+", choices=SIGNALS, default=tuple(SIGNALS))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--engine-timeout-s", type=float, default=1.0)
    parser.add_argument("--log", type=Path, help="where the logs of servers are added to")
    parser.add_argument("--rows", type=Path, help="where a CSV of all rows is written")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    which = list(cases(args.phases, args.layouts, args.how, args.times))
    try:
        for room in (ROOMY, TIGHT):
            some = [case for case in which if (case.phase in BLOCKS) == (room == TIGHT)]
            if some:
                _run(some, args.engine_timeout_s, room, outcomes, args.log)
    finally:
        print_outcomes(outcomes)
        if args.rows is not None:
            chaos_table.write(args.rows, loss_rows(outcomes))
    sys.exit(1 if any(outcome.problems for outcome in outcomes) else 0)


if __name__ == "__main__":
    with ended_by_signals():
        main()
