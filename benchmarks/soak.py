"""An hour of random load, random layouts and engines that are lost: no request may be, nor memory
or descriptors grow.

`python -m benchmarks.soak --minutes 60` starts a server of four engines on a tiny model. Streams
with seeds go on all the time; the layout is changed every few seconds, in every mode; an engine is
killed or frozen every 90 s. After each loss, when all engines are back, blocks must add up. Every
stream is compared with the same request undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from benchmarks.chaos import make_jobs
from benchmarks.chaos_cases import SIGNALS
from benchmarks.switch_storm import FLAGS, LAYOUTS
from flying_lab.signals import ended_by_signals
from flying_serving.config import MODES
from harness.chaos_load import TIMEOUT_S, ChaosLoad
from harness.live import Server

ORDER_S, LOSS_S, SAMPLE_S = (1.0, 6.0), 90.0, 10.0
ENGINES, CLIENTS = 4, 12
BACK_S = 60.0
FLAT_PER_HOUR = {"memory": 0.05, "descriptors": 0.015}
"""How much may grow in an hour, as a share."""
AGES_S = (60, 120, 300, 600, 1200)
"""An engine's memory grows with its age, and ages differ from minute to minute: so it is also shown
by age, up to each of these and above.
"""


@dataclass
class Soak:
    """What has happened so far.

    `samples`: seconds since the start, PSS in bytes and descriptors of all processes. `of_engines`:
    age in seconds and PSS of one engine at a time. `of_others`: PSS of all other processes, in the
    order of the samples.
    """

    samples: list[tuple[float, int, int]] = field(default_factory=list)
    of_engines: list[tuple[float, int]] = field(default_factory=list)
    of_others: list[int] = field(default_factory=list)
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

    def sample(self, server: Server, engines: Collection[int], at_s: float) -> None:
        """Note what all processes hold; `engines`: pids."""
        root = psutil.Process(server.process.pid)
        pss_bytes = others_bytes = descriptors = 0
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                of_this = process.memory_full_info().pss
                descriptors += process.num_fds()
                pss_bytes += of_this
                if process.pid in engines:
                    self.of_engines.append((time.time() - process.create_time(), of_this))
                else:
                    others_bytes += of_this
        self.samples.append((at_s, pss_bytes, descriptors))
        self.of_others.append(others_bytes)

    def growth(self) -> list[str]:
        """What has grown, from the second third of the samples to the last: at first, caches
        fill.
        """
        third = len(self.samples) // 3
        found = []
        for column, what in ((1, "memory"), (2, "descriptors")) if third else ():
            parts = self.samples[third : 2 * third], self.samples[-third:]
            first, last = (statistics.median(sample[column] for sample in part) for part in parts)
            if last > first * (1 + FLAT_PER_HOUR[what]):
                found.append(f"{what} grew from {first:.0f} to {last:.0f}")
        return found


async def soak(server: Server, duration_s: float, seed: int, report: Soak) -> None:
    """Run for some time; the first sample is taken after a minute, or a tenth of the time."""
    load, draw = ChaosLoad(server, make_jobs(), seed), random.Random(seed)
    await load.learn()
    began_s = time.monotonic()
    load.start(CLIENTS)

    async def sample() -> None:
        report.take(load)
        at_s = time.monotonic() - began_s
        if at_s > min(60.0, duration_s / 10):
            engines = (await load.http.get("/flying/status")).json()["engines"]
            report.sample(server, {engine["pid"] for engine in engines}, at_s)

    async def every(pause_s: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
        while (left_s := began_s + duration_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, pause_s()))
            await work()

    try:
        await asyncio.gather(
            every(lambda: draw.uniform(*ORDER_S), lambda: _order(load.http, draw, report)),
            every(lambda: min(LOSS_S, duration_s / 4), lambda: _lose(load.http, draw, report)),
            every(lambda: SAMPLE_S, sample),
        )
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
    if len(report.samples) > 1:
        hours = [at_s / 3600 for at_s, *_ in report.samples]
        for column, what, unit in ((1, "memory (PSS), MiB", 2**20), (2, "descriptors", 1)):
            values = [sample[column] / unit for sample in report.samples]
            slope = statistics.linear_regression(hours, values).slope
            print(
                f"{what}: {values[0]:.0f} at first, {values[-1]:.0f} at last, {slope:+.1f} an hour"
            )
        print(
            f"  without engines: {report.of_others[0] / 2**20:.0f} and "
            f"{report.of_others[-1] / 2**20:.0f}"
        )
        print(f"  an engine, median by age: {', '.join(_by_age(report.of_engines))}")
    print(f"{len(report.problems)} problems")
    for problem in report.problems[:50]:
        print(f"FAILED {problem}")


def _by_age(of_engines: Sequence[tuple[float, int]]) -> Iterator[str]:
    for least_s, most_s in pairwise((0, *AGES_S, math.inf)):
        found = [pss_bytes / 2**20 for age_s, pss_bytes in of_engines if least_s < age_s <= most_s]
        if found:
            yield f"{statistics.median(found):.0f} from {least_s} s on"


def main() -> None:
    """Run from the command line; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-timeout-s", type=float, default=2.0)
    parser.add_argument("--log", type=Path, help="where the server's log is written")
    args = parser.parse_args()
    report = Soak()
    with Server(
        "llama", ENGINES, *FLAGS, "--max-num-seqs=4", f"--engine-timeout-s={args.engine_timeout_s}"
    ) as server:
        try:
            asyncio.run(soak(server, args.minutes * 60, args.seed, report))
        finally:
            print_report(report)
            if args.log is not None:
                args.log.write_text(server.log())
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    with ended_by_signals():
        main()
