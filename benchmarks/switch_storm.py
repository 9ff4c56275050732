"""Hundreds of random switches under load, every stream compared with the same request undisturbed, and what they cost.

`python -m benchmarks.switch_storm --switches 300` starts a server of four engines on a tiny model. It answers each of
some requests once, alone, as the reference. Then it changes the layout again and again, at random times and by random
ways, while streams with and without a fixed degree go on (some are left midway by their clients). It fails if a
stream is not the reference token for token, if blocks do not add up after a switch, or if a process has grown.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from flying_serving.config import PREEMPTS
from flying_serving.demo.tiny import make_model
from tests.live import ROOT, Server
from tests.streams import WORST_LOGPROB, Stream, stream, streamed_body, worst_difference

LAYOUTS: tuple[list[list[int]], ...] = (
    [[0], [1], [2], [3]],
    [[0, 1], [2], [3]],
    [[0], [1], [2, 3]],
    [[0, 1], [2, 3]],
    [[0, 1, 2, 3]],
)
"""Every partition of four engines into aligned groups."""
DEGREES = (None, None, None, 1, 2, 4)
VOCAB = 512
LONGEST_STEP = 64
FLAGS = (
    "--max-logprobs=512",  # to measure a near-tie over the whole vocabulary
    "--kv-cache-memory-bytes=16777216",  # 128 blocks for each engine: lanes compete for them, and all are soon in use
    f"--max-num-batched-tokens={LONGEST_STEP}",  # oneDNN keeps 0.4 MiB per number of tokens and shape
)
LEAVE_SHARE = 0.15
MAX_PAUSE_S = 0.3
BACK_TO_BACK_SHARE = 0.3
WARM_SWITCHES = 50
MEMORY_SHARE, MEMORY_BYTES, COUNT_SLACK = 0.03, 8 << 20, 2
COLUMNS = {  # of the table: field of a switch -> width
    "cutover_ms": 19,
    "in_flight_step_ms": 20,
    "overhead_ms": 19,
    "work_ms": 18,
    "drain_ms": 23,
    "worst_token_gap_ms": 21,
    "waited_for_idle_ms": 22,
}
TARGETS_MS = {"overhead median": 2.0, "overhead p99": 10.0, "cutover less in-flight step, median": 2.0}


@dataclass(frozen=True)
class Job:
    """One request of the load."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int

    def body(self, model: str, degree: int | None) -> dict[str, Any]:
        """What is sent."""
        extra = {} if degree is None else {"vllm_xargs": {"tp_degree": degree}}
        fields = {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": 1.0, "ignore_eos": True}
        return streamed_body(model, self.prompt, **fields, **extra)


@dataclass(frozen=True)
class Sample:
    """What one process holds, while nothing runs."""

    process: str
    rss: int
    uss: int
    pss: int
    fds: int
    threads: int


@dataclass
class Report:
    """What a storm was."""

    switches: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By number of switches so far."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    worst_logprob: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


def make_jobs(count: int, draw: random.Random) -> list[Job]:
    """Requests of 5 to 600 prompt tokens and 16 to 80 output tokens; some begin alike, for the prefix caches."""
    jobs: list[Job] = []
    for number in range(count):
        length = round(5 * 120 ** draw.random())
        begin = jobs[-1].prompt[: length // 2] if number % 4 == 3 else ()
        prompt = (*begin, *(draw.randrange(VOCAB) for _ in range(length - len(begin))))
        jobs.append(Job(f"job {number}", prompt, draw.randint(16, 80), seed=1000 + number))
    return jobs


class Load:
    """Clients that stream random jobs at random degrees and compare each with its reference.

    Args:
        server: where to.
        jobs: what is asked.
        clients: how many at a time.
        draw: source of randomness.
    """

    def __init__(self, server: Server, jobs: Sequence[Job], clients: int, draw: random.Random, report: Report) -> None:
        self._model = server.model
        self._jobs = jobs
        self._draw = draw
        self._report = report
        self._open = asyncio.Event()
        self._idle: set[int] = set()
        self._stopped = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)
        self.reference: dict[str, Stream] = {}
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Answer every job once, alone."""
        for job in self._jobs:
            answer = await stream(self._http, job.body(self._model, None))
            problem = _incomplete(job, answer)
            if problem:
                raise RuntimeError(f"{job.name} undisturbed: {problem}")
            self.reference[job.name] = answer

    async def warm(self) -> None:
        """Let engines build what they build at first use, which is no cost of a switch and no growth.

        Those are oneDNN's kernels for every number of tokens that a step may have, and what vLLM compiles.
        """
        for count in range(1, LONGEST_STEP + 1):
            for degree in (1, 2, 4):
                fields = {"max_tokens": 1, "vllm_xargs": {"tp_degree": degree}}
                body = streamed_body(self._model, [count] * count, **fields)
                await asyncio.gather(*(stream(self._http, body) for _ in range(4 // degree)))
        for degree in (4, 2, 1):
            bodies = [job.body(self._model, degree) for job in self._jobs[: self._clients]]
            answers = await asyncio.gather(*(stream(self._http, body) for body in bodies))
            for job, answer in zip(self._jobs, answers, strict=False):
                await self._compare(job, degree, answer, left=False)

    def start(self) -> None:
        """Let the clients begin."""
        self._open.set()
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]

    async def quiet(self) -> None:
        """Let every stream end and begin no other."""
        self._open.clear()
        while len(self._idle) < self._clients:
            await asyncio.sleep(0.05)

    def resume(self) -> None:
        """Go on after `quiet`."""
        self._open.set()

    async def stop(self) -> None:
        """Let every stream end."""
        self._stopped = True
        self._open.set()
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _client(self, number: int) -> None:
        while not self._stopped:
            if not self._open.is_set():
                self._idle.add(number)
                await self._open.wait()
                self._idle.discard(number)
                continue
            job, degree = self._draw.choice(self._jobs), self._draw.choice(DEGREES)
            leave = self._draw.randint(1, job.max_tokens - 1) if self._draw.random() < LEAVE_SHARE else None
            try:
                answer = await stream(self._http, job.body(self._model, degree), leave_after=leave)
            except (RuntimeError, httpx.HTTPError) as error:
                self._fail(f"{job.name} at degree {degree}: {error!r}")
                await asyncio.sleep(0.5)
            else:
                await self._compare(job, degree, answer, left=leave is not None)

    def _fail(self, text: str) -> None:
        self._report.outcomes["failed"] += 1
        self._report.failures.append(text)

    async def _compare(self, job: Job, degree: int | None, answer: Stream, *, left: bool) -> None:
        reference = self.reference[job.name]
        count = len(answer.tokens)
        problem = None if left else _incomplete(job, answer)
        if answer.tokens != reference.tokens[:count]:
            at = next(i for i in range(count) if answer.tokens[i] != reference.tokens[i])
            lead = await self._lead(job, at, reference.tokens[at], answer.tokens[at])
            problem = (
                f"token {at} of {count} is {answer.tokens[at]}, not {reference.tokens[at]}, which leads it by {lead}"
            )
        else:
            worst = worst_difference(answer.logprobs, reference.logprobs[:count])
            self._report.worst_logprob = max(self._report.worst_logprob, worst)
            if worst > WORST_LOGPROB:
                problem = f"logprobs differ by {worst}"
        if problem:
            self._fail(f"{job.name} at degree {degree}: {problem}")
            return
        self._report.tokens += count
        self._report.outcomes["left midway" if left else "complete"] += 1

    async def _lead(self, job: Job, at: int, expected: int, found: int) -> str:
        """By how much logits plus noise of the expected token exceed the other's: a near-tie is below 1e-4."""
        import torch

        forced = self.reference[job.name].tokens[: at + 1]
        body = job.body(self._model, None)
        body |= {"max_tokens": at + 1, "logprobs": VOCAB, "vllm_xargs": {"force_token_ids": forced}, "stream": False}
        body.pop("stream_options")
        answer = await self._http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})
        if answer.status_code != 200:
            return f"an unknown margin ({answer.text})"
        top = answer.json()["choices"][0]["logprobs"]["top_logprobs"][at]
        generator = torch.Generator().manual_seed(job.seed)
        for _ in range(at + 1):
            noise = torch.empty(VOCAB).exponential_(generator=generator)
        score = {t: top[f"token_id:{t}"] - math.log(noise[t].item()) for t in (expected, found)}
        return f"{score[expected] - score[found]:.2e}"


def _incomplete(job: Job, answer: Stream) -> str | None:
    if answer.finish_reason != "length" or len(answer.tokens) != job.max_tokens or not answer.done:
        return f"{len(answer.tokens)} of {job.max_tokens} tokens, finish_reason={answer.finish_reason}"
    usage = answer.usage or {}
    if (usage.get("completion_tokens"), usage.get("prompt_tokens")) != (job.max_tokens, len(job.prompt)):
        return f"usage {usage}"
    return None


def sample_processes(server: Server) -> list[Sample]:
    """What the API server and each engine hold."""
    root = psutil.Process(server.process.pid)
    samples = []
    children = sorted(root.children(recursive=True), key=lambda process: process.pid)
    engines = [process for process in children if "resource_tracker" not in " ".join(process.cmdline())]
    for name, process in [("API server", root), *((f"engine {i}", p) for i, p in enumerate(engines))]:
        memory = process.memory_full_info()
        counts = process.num_fds(), process.num_threads()
        samples.append(Sample(name, memory.rss, memory.uss, memory.pss, *counts))
    return samples


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """What has grown beyond what is allowed.

    That is resident memory by process, and the sum of what belongs to each alone or in shares. Shares move: a page that
    an engine was forked with counts more for the server once the engine has written to its own copy.
    """
    problems = []
    memory = [sum(sample.pss for sample in samples) for samples in (before, after)]
    if memory[1] - memory[0] > MEMORY_SHARE * memory[0]:
        problems.append(f"memory of all processes grew from {memory[0] >> 20} to {memory[1] >> 20} MiB")
    if [s.process for s in before] != [s.process for s in after]:
        problems.append(f"processes were {[s.process for s in before]}, are {[s.process for s in after]}")
    for old, new in zip(before, after, strict=False):
        if new.rss - old.rss > max(MEMORY_BYTES, MEMORY_SHARE * old.rss):
            problems.append(f"{old.process}: rss grew by {(new.rss - old.rss) / 2**20:.1f} MiB")
        for what in ("fds", "threads"):
            if abs(getattr(new, what) - getattr(old, what)) > COUNT_SLACK:
                problems.append(f"{old.process}: {what} were {getattr(old, what)}, are {getattr(new, what)}")
    return problems


async def storm(
    server: Server,
    switches: int,
    *,
    clients: int = 10,
    jobs: int = 32,
    seed: int = 0,
    preempts: Sequence[str] = PREEMPTS,
) -> Report:
    """Run a storm. Samples processes after WARM_SWITCHES switches (or a third of fewer) and at the end."""
    draw, report = random.Random(seed), Report()
    load = Load(server, make_jobs(jobs, random.Random(seed)), clients, random.Random(seed + 1), report)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as admin:
        await _layout(admin, LAYOUTS[0], "weave")
        await load.learn()
        await load.warm()
        skip = len((await admin.get("/flying/switches")).json()["switches"])
        began_s = time.monotonic()
        load.start()
        for number in range(1, switches + 1):
            if draw.random() >= BACK_TO_BACK_SHARE:
                await asyncio.sleep(draw.uniform(0, MAX_PAUSE_S))
            await _switch(admin, draw.choice(LAYOUTS), draw.choice(preempts), report)
            if number in (min(WARM_SWITCHES, switches // 3), switches):
                await load.quiet()
                await _check_idle(admin, report)
                await asyncio.sleep(0.5)
                report.samples[number] = sample_processes(server)
                load.resume()
        await load.stop()
        report.seconds = time.monotonic() - began_s
        report.switches = (await admin.get("/flying/switches")).json()["switches"][skip:]
    report.failures += growth(*(report.samples[n] for n in sorted(report.samples)))
    return report


async def _layout(admin: httpx.AsyncClient, groups: list[list[int]], preempt: str) -> None:
    answer = await admin.post("/flying/layout", json={"groups": groups, "preempt": preempt})
    if answer.status_code != 200 or answer.json()["to"] != groups:
        raise RuntimeError(f"switch to {groups} by {preempt}: {answer.status_code} {answer.text}")


async def _switch(admin: httpx.AsyncClient, groups: list[list[int]], preempt: str, report: Report) -> None:
    await _layout(admin, groups, preempt)
    answer = await admin.post("/flying/check")
    if answer.status_code != 200:
        report.failures.append(f"blocks after the switch to {groups} by {preempt}: {answer.text}")


async def _check_idle(admin: httpx.AsyncClient, report: Report) -> None:
    """Nothing is left of a request once all streams have ended."""
    deadline = time.monotonic() + 10
    while True:
        status = (await admin.get("/flying/status")).json()
        lanes = [lane for engine in status["engines"] for lane in engine["lanes"].values()]
        left = sum(status["requests"].values()) + sum(lane["running"] + lane["waiting"] for lane in lanes)
        if not left:
            break
        if time.monotonic() > deadline:
            report.failures.append(f"requests left when all streams had ended: {status}")
            break
        await asyncio.sleep(0.1)
    answer = await admin.post("/flying/check")
    if answer.status_code != 200:
        report.failures.append(f"blocks while idle: {answer.text}")


# ---- figures


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def cutover_beyond_step(switch: dict[str, Any]) -> float:
    """Milliseconds from the order to the new layout, less the step that was under way."""
    return float(switch["cutover_ms"] - switch["in_flight_step_ms"])


def acceptance(switches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures that TARGETS_MS bounds."""
    overheads = [switch["overhead_ms"] for switch in switches]
    at_once = [cutover_beyond_step(s) for s in switches if s["preempt"] != "sequential"] or [0.0]
    figures = (statistics.median(overheads), percentile(overheads, 0.99), statistics.median(at_once))
    return dict(zip(TARGETS_MS, figures, strict=True))


def print_report(report: Report) -> None:
    """Switch costs by way of switching, processes, outcomes, failures."""
    outcomes = ", ".join(f"{count} {what}" for what, count in sorted(report.outcomes.items()))
    print(f"\n{len(report.switches)} switches in {report.seconds:.0f} s; streams: {outcomes}; {report.tokens} tokens")
    print(f"largest difference of a logprob from the reference: {report.worst_logprob:.1e}")
    print(f"\nmilliseconds, median / p99 / max {'':26}{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(f"{'preempt':<11}{'n':>4}" + "".join(f"{c.removesuffix('_ms'):>{w}}" for c, w in COLUMNS.items()))
    for preempt in (*PREEMPTS, "all"):
        rows = [s for s in report.switches if preempt in ("all", s["preempt"])]
        cells = {c: _cell([s[c] for s in rows if s[c] is not None]) for c in COLUMNS}
        print(f"{preempt:<11}{len(rows):>4}" + "".join(f"{cell:>{COLUMNS[c]}}" for c, cell in cells.items()))
    print()
    for name, value in acceptance(report.switches).items():
        print(f"{name}: {value:.2f} ms (target < {TARGETS_MS[name]:g} ms: {_verdict(value < TARGETS_MS[name])})")
    first, last = sorted(report.samples)
    print(f"\n{'process':<12}" + "".join(f"{w:>20}" for w in ("rss MiB", "uss MiB", "pss MiB", "fds", "threads")))
    for old, new in zip(report.samples[first], report.samples[last], strict=True):
        pairs = [f"{getattr(old, w) / 2**20:.1f} -> {getattr(new, w) / 2**20:.1f}" for w in ("rss", "uss", "pss")]
        pairs += [f"{getattr(old, w)} -> {getattr(new, w)}" for w in ("fds", "threads")]
        print(f"{old.process:<12}" + "".join(f"{pair:>20}" for pair in pairs))
    print(f"(after switch {first} and after switch {last}, idle)")
    for failure in report.failures[:50]:
        print(f"FAILED {failure}")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    figures = statistics.median(values), percentile(values, 0.99), max(values)
    return " / ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in figures)


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    """Run from the command line; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=300)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preempts", nargs="+", choices=PREEMPTS, default=PREEMPTS)
    args = parser.parse_args()
    with Server(make_model(ROOT / ".models" / "llama", "llama"), 4, *FLAGS) as server:
        report = asyncio.run(
            storm(server, args.switches, clients=args.clients, jobs=args.jobs, seed=args.seed, preempts=args.preempts)
        )
    print_report(report)
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
