"""An hour of random load, random layouts and engines that are lost: no request may be, nor memory
or descriptors grow.

`python -m benchmarks.soak --minutes 60` starts a server of four engines on a tiny model. Streams
with seeds go on all the time; the layout is changed every few seconds, in every mode; an engine is
killed or frozen every 90 s. After each loss, when all engines are back, blocks must add up. Every
stream is compared with the same request undisturbed.

To find whose growth is seen: with `--no-losses` the layout changes and no engine is lost; with
`--stock` the same streams go to stock vLLM with four engines in data parallel. The server is
started as a user would, so that it shares no page with a process beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks import soak_memory
from benchmarks.chaos import make_jobs
from benchmarks.chaos_cases import SIGNALS
from benchmarks.switch_storm import FLAGS, LAYOUTS
from flying_lab.signals import ended_by_signals
from flying_serving.config import MODES
from harness.chaos_load import TIMEOUT_S, ChaosLoad
from harness.forked import ENVIRONMENT
from harness.live import COMMAND, STOCK, Server
from harness.live import FLAGS as LIVE_FLAGS

ORDER_S, LOSS_S, SAMPLE_S = (1.0, 6.0), 90.0, 10.0
ENGINES, CLIENTS = 4, 12
BACK_S = 60.0
FLAT_PER_HOUR = {"memory": 0.05, "descriptors": 0.015}
"""How much may grow in an hour, as a share."""
NO_PLUGINS = {"VLLM_PLUGINS": ""}
ONE_STEP = "--max-num-batched-tokens=2048"
"""Stock vLLM 0.32 ends on the CPU where a prompt with a seed takes two steps."""


@dataclass
class Soak:
    """What has happened so far."""

    samples: list[soak_memory.Sample] = field(default_factory=list)
    requests: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    back_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, load: ChaosLoad) -> None:
        """Count requests that have ended, and forget them."""
        ended = [one for one in load.asked if one.is_over]
        load.asked = [one for one in load.asked if not one.is_over]
        self.requests += len(ended)
        self.problems += [
            f"{one.name} ({one.job.name}): {one.failed or one.wrong}" for one in ended if one.is_bad
        ]

    def growth(self) -> Iterator[str]:
        """What has grown by more than it may, from the second third of the samples to the last.

        Pages of files do not count: processes beside the server share them, come and go.
        """
        if len(self.samples) < 3:
            return
        memory = [one.mib() - one.mib("Pss_File") for one in self.samples]
        descriptors = [float(one.descriptors) for one in self.samples]
        for what, values in (("memory", memory), ("descriptors", descriptors)):
            before, after = soak_memory.thirds(values)
            if after > before * (1 + FLAT_PER_HOUR[what]):
                yield f"{what} grew from {before:.0f} to {after:.0f}"


@dataclass(frozen=True)
class Course:
    """What is done beside the load.

    Args:
        duration_s: how long.
        seed: of all draws.
        clients: of the load, at a time.
        layouts, losses: whether the layout changes, and whether engines are lost.
        samples: a file to which what the processes hold is added; None for none.
    """

    duration_s: float
    seed: int
    clients: int
    layouts: bool
    losses: bool
    samples: Path | None


async def soak(server: Server, course: Course, report: Soak) -> None:
    """Run for some time; the first sample is taken after a minute, or a tenth of the time."""
    load, draw = ChaosLoad(server, make_jobs(), course.seed), random.Random(course.seed)
    await load.learn()
    began_s, duration_s = time.monotonic(), course.duration_s
    load.start(course.clients)

    async def sample() -> None:
        report.take(load)
        at_s = time.monotonic() - began_s
        if at_s > min(60.0, duration_s / 10):
            report.samples.append(soak_memory.take(server.process.pid, at_s))
            if course.samples is not None:
                soak_memory.append(report.samples[-1], course.samples)

    async def every(pause_s: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
        while (left_s := began_s + duration_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, pause_s()))
            await work()

    works = [every(lambda: SAMPLE_S, sample)]
    if course.layouts:
        orders = lambda: _order(load.http, draw, report)  # noqa: E731
        works.append(every(lambda: draw.uniform(*ORDER_S), orders))
    if course.losses:
        losses = lambda: _lose(load.http, draw, report)  # noqa: E731
        works.append(every(lambda: min(LOSS_S, duration_s / 4), losses))
    try:
        await asyncio.gather(*works)
        await load.stop()
        report.take(load)
    finally:
        await load.close()
    report.problems += report.growth()


async def _order(http: httpx.AsyncClient, draw: random.Random, report: Soak) -> None:
    body = {"groups": draw.choice(LAYOUTS), "mode": draw.choice(MODES)}
    try:
        answer = await http.post("/flying/layout", json=body)
    except httpx.TimeoutException:
        status = (await http.get("/flying/status")).json()
        report.problems.append(f"{body} was not answered within {TIMEOUT_S:g} s: {status}")
        return
    report.orders[f"{answer.status_code}"] += 1
    # made; an engine of it is lost; another replaced it
    if answer.status_code not in (
        200,
        400,
        409,
        503,
    ):
        report.problems.append(f"{body}: {answer.status_code} {answer.text}")


async def _lose(http: httpx.AsyncClient, draw: random.Random, report: Soak) -> None:
    engines = (await http.get("/flying/status")).json()["engines"]
    victim, how = draw.choice(engines), draw.choice(list(SIGNALS))
    began_s = time.monotonic()
    os.kill(victim["pid"], SIGNALS[how])
    report.losses[how] += 1
    while True:
        engines = (await http.get("/flying/status")).json()["engines"]
        if len(engines) == ENGINES and victim["pid"] not in {engine["pid"] for engine in engines}:
            break
        if time.monotonic() - began_s > BACK_S:
            report.problems.append(
                f"engine {victim['engine']} was not back within {BACK_S:g} s of its {how}"
            )
            return
        await asyncio.sleep(0.1)
    report.back_s.append(time.monotonic() - began_s)
    answer = await http.post("/flying/check", json={})
    if answer.status_code != 200:
        report.problems.append(
            f"blocks after the {how} of engine {victim['engine']}: {answer.text}"
        )


def print_report(report: Soak) -> None:
    """Counts, memory and descriptors with their slopes, problems."""
    losses = ", ".join(f"{count} {how}" for how, count in sorted(report.losses.items()))
    orders = ", ".join(f"{count} with {status}" for status, count in sorted(report.orders.items()))
    print(
        f"\n{report.requests} requests; engines lost: {losses or 'none'}; orders: "
        f"{orders or 'none'}"
    )
    if report.back_s:
        print(
            f"all engines back after {statistics.median(report.back_s):.1f} s, worst "
            f"{max(report.back_s):.1f} s"
        )
    print(*soak_memory.report(report.samples), sep="\n")
    print(f"{len(report.problems)} problems")
    for problem in report.problems[:50]:
        print(f"FAILED {problem}")


def make_server(args: argparse.Namespace) -> Server:
    """The server that is asked for: ours, or stock vLLM with the flags that it knows."""
    flags = (*FLAGS, "--max-num-seqs=4")
    if args.stock:
        base = tuple(flag for flag in LIVE_FLAGS if not flag.startswith("--policy"))
        return Server(
            "llama",
            ENGINES,
            *flags,
            ONE_STEP,
            "--enforce-eager",
            base=base,
            program=STOCK,
            environment=ENVIRONMENT | NO_PLUGINS,
        )
    timeout = f"--engine-timeout-s={args.engine_timeout_s}"
    return Server("llama", ENGINES, *flags, timeout, program=COMMAND)


def main() -> None:
    """Run from the command line; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-timeout-s", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--no-losses", action="store_true", help="no engine is lost")
    parser.add_argument("--stock", action="store_true", help="stock vLLM, data parallel")
    parser.add_argument("--samples", type=Path, help="where what the processes hold is added")
    parser.add_argument("--log", type=Path, help="where the server's log is written")
    args = parser.parse_args()
    report = Soak()
    course = Course(
        duration_s=args.minutes * 60,
        seed=args.seed,
        clients=args.clients,
        layouts=not args.stock,
        losses=not (args.stock or args.no_losses),
        samples=args.samples,
    )
    with make_server(args) as server:
        try:
            asyncio.run(soak(server, course, report))
        finally:
            print_report(report)
            if args.log is not None:
                args.log.write_text(server.log())
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    with ended_by_signals():
        main()
