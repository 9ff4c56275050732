"""Streams whose clients leave at random moments: nothing of them stays behind, wherever they were.

python -m benchmarks.cancel [--streams 1000] [--clients 24] [--seed 0]

Four engines, the tiny model. Clients ask for prompts of 5 to 1,500 tokens, some of them with a
deadline for their wait, as two sequences, at a degree, at a split, without a stream or with a
priority, and leave after up to 0.3 s or after up to 40 events. Meanwhile the layout changes all the
time, in all modes: while a *sequential* or *migrate* waits, requests wait in the task pool, and an
order that has waited for PATIENCE_S is taken back. At the end, and after a warm-up of a tenth, the
server's open files, sockets, children and run directory are listed: both times there has to be the
same. No block may be in use, no request anywhere, the books of all engines have to balance, and a
server that waits for its last request before it ends has to end at once.
"""

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from flying_lab.signals import ended_by_signals
from flying_serving.config import MODES
from harness.live import Server, wait_until
from harness.streams import RequestFailed, Stream, stream, streamed_body

FLAGS = ("--max-num-seqs=4", "--shutdown-timeout=60", "--kv-cache-memory-bytes=33554432")
LAYOUTS = [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1], [2], [3]]]
LONGEST_PROMPT, OUTPUT_TOKENS, LATEST_S, LAST_EVENT, PATIENCE_S = 1500, 200, 0.3, 40, 1.0
LEAST_SWITCHES = 3
"""Streams go on to leave until the layout has changed as often."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Cancelled:
    """How many streams their clients left, by where they were then; `unexpected`: answers that no
    client asked for.
    """

    where: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    switches: int = 0


def left_behind(server: Server) -> dict[str, object]:
    """What the server's processes have open, and what is in their run directory."""
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    run_dirs = {
        Path(file.path).parent
        for file in root.open_files()
        if file.path.startswith(f"{SHARED_MEMORY}/") and Path(file.path).name == "owner"
    }
    return {
        "children": len(processes),
        "descriptors": {one.pid: one.num_fds() for one in processes},
        "sockets": len(root.net_connections("tcp")),
        "run directory": sorted(str(path) for folder in run_dirs for path in folder.rglob("*")),
    }


def body(model: str, draw: random.Random) -> dict[str, Any]:
    """A random request."""
    prompt = [
        draw.randrange(300, 500) for _ in range(round(5 * (LONGEST_PROMPT / 5) ** draw.random()))
    ]
    kinds: list[dict[str, Any]] = [
        {},
        {"vllm_xargs": {"queue_deadline_s": 60}},
        {"vllm_xargs": {"tp_degree": draw.choice((1, 2, 4))}},
        {"vllm_xargs": {"split_at": draw.randrange(len(prompt) + OUTPUT_TOKENS // 2)}},
        {"n": 2},
        {"stream": False, "stream_options": None},
        {"priority": draw.choice((-1, 1))},
    ]
    return streamed_body(
        model, prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=1.0
    ) | draw.choice(kinds)


class Leavers:
    """Clients that leave."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        self._server = server
        self._draw = draw
        self.found = Cancelled()
        self._changing = False

    async def run(self, streams: int, clients: int) -> None:
        """Open so many streams and leave them, while the layout changes."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=120, limits=limits) as http:
            left = iter(range(streams))

            async def client() -> None:
                while next(left, None) is not None or self.found.switches < LEAST_SWITCHES:
                    await self._one(http)

            switching = asyncio.create_task(self._switch(http))
            await asyncio.gather(*(client() for _ in range(clients)))
            switching.cancel()
            with suppress(asyncio.CancelledError):
                await switching
            for groups in (LAYOUTS[0], LAYOUTS[2], LAYOUTS[0]):  # all lanes are idle then
                (
                    await http.post("/flying/layout", json={"groups": groups, "mode": "migrate"})
                ).raise_for_status()

    async def _one(self, http: httpx.AsyncClient) -> None:
        draw, into = self._draw, Stream()
        request, by_time = body(self._server.model, draw), draw.random() < 0.7
        after = None if by_time else draw.randint(1, LAST_EVENT)
        task = asyncio.create_task(stream(http, request, leave_after=after, into=into))
        done, _ = await asyncio.wait(
            [task], timeout=LATEST_S * draw.random() ** 2 if by_time else None
        )
        where = "decoded" if into.chunks else "had no token"
        self.found.where[f"{where}{', layout changing' if self._changing else ''}"] += 1
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except (RequestFailed, KeyError) as error:
            if not request["stream"] or request.get("n"):
                return  # is read as what it is not
            self.found.unexpected.append(f"{request.keys()}: {error}")
        del done

    async def _switch(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(self._draw.uniform(0, 0.2))
            order = {"groups": self._draw.choice(LAYOUTS), "mode": self._draw.choice(MODES)}
            self._changing = True
            with suppress(TimeoutError):  # it waits for requests to end, and is taken back
                async with asyncio.timeout(PATIENCE_S):
                    answer = await http.post("/flying/layout", json=order)
                answer.raise_for_status()
                self.found.switches += 1
            self._changing = False


def cancel(server: Server, streams: int, clients: int, seed: int) -> Cancelled:
    """Have streams left. Raises AssertionError if anything of them stays behind."""
    draw = random.Random(seed)
    leavers = Leavers(server, draw)
    asyncio.run(leavers.run(max(20, streams // 10), clients))
    settle(server)
    before = left_behind(server)
    leavers.found = Cancelled()
    asyncio.run(leavers.run(streams, clients))
    settle(server)
    wait_until(lambda: left_behind(server) == before, lambda: (before, left_behind(server)))
    assert not leavers.found.unexpected, leavers.found.unexpected
    return leavers.found


def settle(server: Server) -> None:
    """Until no request and no block is left. Raises AssertionError if that does not come."""
    server.until_idle()
    wait_until(_succeeds(server), server.status)
    server.check()
    wait_until(lambda: _free(server), server.status)


def _succeeds(server: Server) -> Callable[[], bool]:
    """Whether all prefix caches could be reset, which they cannot while any block is in use."""
    return lambda: bool(server.http.post("/reset_prefix_cache").json()["success"])


def _free(server: Server) -> bool:
    """Whether all blocks but vLLM's null block are free, or lent to groups without requests."""
    return all(
        one["free_blocks"] + sum(one["lent_blocks"].values()) == one["blocks"] - 1
        for one in server.status()["engines"]
    )


def ends_at_once(server: Server) -> float:
    """End a server that waits for its last request. Returns the seconds. Raises AssertionError if
    one is left.
    """
    began_s = time.monotonic()
    assert server.stop(), "SIGTERM was not enough"  # within less than its --shutdown-timeout
    return time.monotonic() - began_s


def main() -> None:
    """Start a server and leave its streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # prefix caches can be reset
    with Server("llama", 4, *FLAGS) as server:
        began_s = time.monotonic()
        found = cancel(server, options.streams, options.clients, options.seed)
        print(
            f"{options.streams} streams in {time.monotonic() - began_s:.0f} s, {found.switches} "
            "switches"
        )
        print(
            "left when: "
            + ", ".join(f"{where} {count}" for where, count in sorted(found.where.items()))
        )
        print("no block, request, socket, descriptor or file is left")
        print(f"ended in {ends_at_once(server):.1f} s")


if __name__ == "__main__":
    with ended_by_signals():
        main()
