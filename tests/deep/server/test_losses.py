"""Several engines that are lost, one that is lost at the worst moment, and too few that are left
(docs/design/faults.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from flying_serving.cli.main import TOO_FEW_ENGINES
from harness.chaos_load import ChaosLoad, make_jobs
from harness.chaos_traps import EVENTS, PREAMBLE, Trap
from harness.faulty_engines import ends_at_each_start
from harness.live import Server, wait_until
from harness.preambles import calling

pytestmark = pytest.mark.server

ENGINES = 4
BACK_S = 90.0
END_S = 60.0
SUSPECTED = "times while it computed the prompt of this request"
FLAGS = ("--kv-cache-memory-bytes=16777216", "--max-num-batched-tokens=32", "--max-num-seqs=4")


class Losing(Server):
    """A server with traps."""

    def __init__(self, folder: Path, engines: int = ENGINES, *flags: str) -> None:
        super().__init__(
            "llama", engines, *FLAGS, *flags, preamble=PREAMBLE.format(folder=str(folder))
        )
        self.folder, self.engines = folder, engines

    def pids(self) -> list[int]:
        """Of the engines' processes, by engine; of those that are there."""
        return [
            engine["pid"]
            for engine in sorted(self.status()["engines"], key=lambda one: one["engine"])
        ]

    def until(self, what: str, count: int) -> None:
        """Return once an event has come so many times."""
        wait_until(lambda: len(self.events(what)) >= count, lambda: self.log()[-3000:], BACK_S)

    def events(self, what: str) -> list[dict[str, Any]]:
        """What was noted, since the last `forget`."""
        path = self.folder / EVENTS
        found = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return [event for event in found if event["what"] == what]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Losing]:
    with Losing(tmp_path_factory.mktemp("traps")) as live:
        yield live


def kill(pids: Sequence[int]) -> None:
    """All of them, one right after the other."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def lose_under_load(
    server: Losing, layout: list[list[int]], lose: Any, *, several: bool = False
) -> None:
    """Stream while `lose` runs, and until all engines are back; every stream is as undisturbed.

    `several` engines are lost: a request whose prompt two of them have computed, one after the
    other, may be taken for one that kills engines.
    """
    (server.folder / EVENTS).unlink(missing_ok=True)
    load = ChaosLoad(server, make_jobs(8))
    try:
        await load.learn()
        await asyncio.to_thread(server.layout, layout)
        load.start(clients=8)
        await load.until_streaming()
        await asyncio.to_thread(lose)
        await load.stop()
    finally:
        await load.close()
    assert load.asked
    bad = [one for one in load.asked if one.is_bad]
    assert not [
        (one.name, one.failed, one.wrong)
        for one in bad
        if not (several and SUSPECTED in str(one.failed))
    ]
    await asyncio.to_thread(server.until_idle)
    await asyncio.to_thread(
        wait_until, lambda: len(server.pids()) == server.engines, server.log, BACK_S
    )
    await asyncio.to_thread(server.check)


@pytest.mark.parametrize(
    "lost", [(0, 1), (1, 2), (0, 1, 2)], ids=["of-one-group", "of-two-groups", "all-but-one"]
)
async def test_engines_lost_together_all_come_back(server: Losing, lost: tuple[int, ...]) -> None:
    """Also where only one is left, and the layout that was ordered is made again. They start by
    `vllm_adapter/processes/start.py`.
    """

    def lose() -> None:
        pids = server.pids()
        kill([pids[engine] for engine in lost])
        server.until("back", len(lost))

    layout = [[0, 1], [2, 3]]
    await lose_under_load(server, layout, lose, several=True)
    wait_until(lambda: server.status()["layout"] == layout, server.status)


async def test_an_engine_that_alone_is_told_to_end_costs_no_request(server: Losing) -> None:
    """SIGTERM, as of a daemon that wants its memory. vLLM's engine would abort what it runs."""

    def lose() -> None:
        os.kill(server.pids()[0], signal.SIGTERM)
        server.until("back", 1)
        assert server.events("orphaned")

    await lose_under_load(server, [[0, 1], [2, 3]], lose)


@pytest.mark.parametrize("phase", ["order sent", "order acknowledged"])
async def test_a_leader_is_lost_in_the_middle_of_a_switch(server: Losing, phase: str) -> None:
    """The order is answered with 5xx, says who was lost, and can be given again when all are
    back.
    """
    orders: list[Any] = []

    def lose() -> None:
        Trap(phase, 0, signal.SIGKILL).lay(server.folder)
        body = {"groups": [[0, 1, 2, 3]], "mode": "migrate"}
        orders.append(server.http.post("/flying/layout", json=body))
        server.until("back", 1)

    await lose_under_load(server, [[0, 1], [2, 3]], lose)
    (answer,) = orders
    if phase == "order sent":
        assert answer.status_code >= 500, answer.text
        assert "engine 0 was lost" in answer.text
    assert server.layout([[0, 1, 2, 3]])["to"] == [[0, 1, 2, 3]]


async def test_an_engine_is_lost_while_another_starts_again(server: Losing) -> None:
    def lose() -> None:
        pids = server.pids()
        Trap("starting again", 2, signal.SIGKILL, of_owner=True, pid=pids[2]).lay(server.folder)
        kill([pids[1]])
        server.until("back", 2)
        assert [event["engine"] for event in server.events("lost")] == [1, 2]

    await lose_under_load(server, [[0, 1], [2, 3]], lose)


async def test_engines_of_two_devices_survive_the_loss_of_a_worker(tmp_path: Path) -> None:
    """One that is killed, and another that freezes: its engine is lost, with its other workers, and
    starts again.
    """
    with Losing(tmp_path, 2, "--tensor-parallel-size=2") as server:

        def lose() -> None:
            for count, (engine, number) in enumerate([(1, signal.SIGKILL), (0, signal.SIGSTOP)], 1):
                workers = psutil.Process(server.pids()[engine]).children()
                os.kill(workers[-1].pid, number)
                server.until("back", count)
                wait_until(
                    lambda workers=workers: (
                        not [worker for worker in workers if worker.is_running()]
                    )
                )
            assert [event["engine"] for event in server.events("lost")] == [1, 0]

        await lose_under_load(server, [[0, 1]], lose, several=True)


# ---- too few are left


def end_of(server: Server, pids: Sequence[int]) -> str:
    """What a server says that ends because these are killed."""
    kill(pids)
    wait_until(lambda: server.process.poll() is not None, server.log, END_S)
    assert server.process.returncode == TOO_FEW_ENGINES
    (said,) = [line for line in server.log().splitlines() if line.startswith("flying-serving: ")]
    return said


def test_a_server_ends_when_all_engines_are_lost() -> None:
    with Server("llama", 2) as server:
        said = end_of(server, [engine["pid"] for engine in server.status()["engines"]])
        assert "0 engines are left, at least 1 are needed (--min-engines)" in said


def test_a_server_ends_below_its_least_number_of_engines() -> None:
    with Server("llama", 2, "--min-engines=2") as server:
        said = end_of(server, [server.status()["engines"][1]["pid"]])
        assert (
            "engine 1 was lost: its process has ended; 1 engines are left, at least 2 are needed"
            in said
        )


def test_an_engine_that_fails_at_each_start_is_left_alone() -> None:
    """Longer each time; the other serves, also what asks for its layout."""
    with Server("llama", 2, preamble=calling(ends_at_each_start)) as server:
        expected = server.complete([1, 2, 3], max_tokens=8, seed=7)["token_ids"]
        kill([server.status()["engines"][1]["pid"]])
        began_s = time.monotonic()

        def failures() -> int:
            return server.log().count("engine 1 could not be started again")

        wait_until(lambda: failures() >= 3, server.log, BACK_S)
        # between the starts; before the first there is no wait
        assert time.monotonic() - began_s > 1.0 + 2.0
        wait_until(
            lambda: "engine 1 was lost 3 times in a row; next start in 4 s" in server.log(),
            server.log,
        )
        assert server.complete([1, 2, 3], max_tokens=8, seed=7)["token_ids"] == expected
        refused = server.http.post("/flying/layout", json={"groups": [[0, 1]]})
        assert refused.status_code == 400, refused.text
        server.check()
