"""Time the controller's decisions with 8 engines and 5,000 requests that wait: `python -m
benchmarks.decisions`.

Decisions wait for nothing, so their processor time is how long they take on a free core. The last
column is the time that has passed, which on a busy machine also holds what others did meanwhile. A
switch (`regrouped`) may take every request that runs from its group and find another for it.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, count

from benchmarks.policies import OBJECTIVE
from flying_serving.controller.commands import Command, Dispatch, Order, Recall
from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.switches import Switch
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import Step
from flying_serving.wire import SwitchAnswer

ENGINES = 8
SIZES = (1, 2, 4, 8)
MAX_NUM_SEQS, STEP_TOKENS, ENGINE_TOKENS = 64, 2048, 40_000
STEP_S = 0.02
LIMIT_MS = 1.0
MEASUREMENTS = ("tokens", "stepped")
"""Events that decide nothing."""
COST = MigrationCost(fixed_s=0.005, token_s=1e-6)
ANSWER = SwitchAnswer(10.0, 0.5, 0.1)


def step(size: int, prefill: int, sequences: int, context: int, noise: float = 1.0) -> Step:
    """A measured step: groups start sooner and do less per second than their engines apart."""
    share = 0.65 ** (size.bit_length() - 1)
    took_s = 0.02 * (0.6 if size > 1 else 1.0) + share * (
        1e-4 * prefill + 5e-4 * sequences + 1e-7 * context
    )
    return Step(size, took_s * noise, prefill, sequences, context)


class Bench:
    """A controller under load, and the times that its answers took."""

    def __init__(self, policy: str, waiting: int) -> None:
        capacity = Capacity({size: ENGINE_TOKENS * size for size in SIZES}, 1)
        limits = Limits(MAX_NUM_SEQS, STEP_TOKENS)
        settings = Settings(
            ENGINES, capacity, POLICIES[policy], limits, OBJECTIVE, most_waiting=2 * waiting
        )
        self.controller = Controller(settings)
        batches = [(0, 1, 500), (0, 8, 500), (0, 8, 8000), (64, 0, 0), (2048, 0, 0)]
        self.controller.state.migrates = dict.fromkeys(SIZES[1:], COST)
        self.controller.state.steps.calibrate(
            step(size, *batch) for size in SIZES for batch in batches
        )
        self.waiting = waiting
        self.draw = random.Random(1)
        self.now_s = 0.0
        self.ordered: Switch | None = None
        self.running: dict[str, int] = {}
        self.numbers = count()
        self.times_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.passed_ms: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, call: Callable[[], list[Command] | None]) -> None:
        """Call the controller and do as it says."""
        begin_s, used_s = time.perf_counter(), time.thread_time()
        commands = call()
        self.times_ms[name].append((time.thread_time() - used_s) * 1e3)
        self.passed_ms[name].append((time.perf_counter() - begin_s) * 1e3)
        for command in commands or ():
            match command:
                case Dispatch(request_id):
                    self.running[request_id] = 0
                case Recall(request_id, _):
                    del self.running[request_id]
                case Order(switch, _):
                    self.ordered = switch

    def arrive(self) -> None:
        """A request comes: mostly short ones, some urgent, some too long for one engine."""
        draw = self.draw
        long = draw.random() < 0.002
        prompt = draw.randint(50_000, 60_000) if long else draw.randint(50, 1500)
        outputs = draw.randint(50, 400)
        priority = -1 if draw.random() < 0.002 else draw.choice([0, 0, 0, 1])
        spec = RequestSpec(
            prompt, prompt + outputs, outputs, None, priority, draw.choice([None, None, 600.0])
        )
        name = f"r{next(self.numbers)}"
        self.timed("arrived", lambda: self.controller.arrived(name, spec, self.now_s))

    def step(self) -> None:
        """One step of all engines: some requests end, all others get a token; answers to an order
        come.
        """
        controller = self.controller
        self.now_s += STEP_S
        if self.ordered is not None:
            self.ordered = None
            self.timed("regrouped", lambda: controller.regrouped(self.now_s))
            self.timed(
                "acknowledged", lambda: controller.acknowledged([ANSWER] * ENGINES, self.now_s)
            )
        for name in list(self.running):
            self.running[name] += 1
            self.timed("tokens", lambda name=name: controller.got_tokens(name, 1, self.now_s))  # type: ignore[misc]
        over = [name for name in self.running if self.draw.random() < 1 / 200]
        for name in over:
            del self.running[name]
        if over:
            self.timed("finished", lambda: controller.finished(over, self.now_s))
        while len(controller.state.pool) > self.waiting:
            gone = next(reversed(list(controller.state.pool))).request_id
            self.timed(
                "aborted", lambda gone=gone: controller.finished([gone], self.now_s, aborted=True)
            )  # type: ignore[misc]
        measured = []
        for group in controller.state.layout.groups:
            sequences = self.draw.randint(1, 60)
            context = sequences * self.draw.randint(200, 1500)
            prefill, noise = self.draw.choice([0, 0, 512]), self.draw.uniform(0.9, 1.1)
            measured.append(step(len(group), prefill, sequences, context, noise))
        self.timed("stepped", lambda: controller.stepped(measured))  # type: ignore[func-returns-value]


def run(policy: str, waiting: int, steps: int) -> Bench:
    """Fill the pool, then keep it full while engines step."""
    bench = Bench(policy, waiting)
    while len(bench.controller.state.pool) < waiting:
        bench.arrive()
    bench.times_ms.clear()
    bench.passed_ms.clear()
    for number in range(steps):
        bench.step()
        while len(bench.controller.state.pool) < waiting:
            bench.arrive()
        for _ in range(2):
            bench.arrive()
        if number % 5 == 0:
            bench.timed("tick", lambda: bench.controller.tick(bench.now_s))
    return bench


def _p99(times_ms: list[float]) -> float:
    return (
        statistics.quantiles(times_ms, n=100, method="inclusive")[98]
        if len(times_ms) > 1
        else times_ms[0]
    )


def main() -> None:
    """Print the table; exit code 1 if a decision takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="auto", choices=sorted(POLICIES))
    parser.add_argument("--waiting", type=int, default=5000, help="requests in the pool")
    parser.add_argument("--steps", type=int, default=1000, help="steps of all engines")
    args = parser.parse_args()
    gc.disable()  # as a server that has frozen what it started with: a collection is not a decision
    bench = run(args.policy, args.waiting, args.steps)
    state = bench.controller.state
    print(
        f"policy {args.policy}, {ENGINES} engines, {len(state.pool)} waiting, {state.running} "
        "running, "
        f"{state.switches.count} switches; milliseconds of processor time"
    )
    print(f"{'event':>12} {'count':>8} {'median':>8} {'p99':>8} {'max':>8} {'p99 passed':>11}")
    for name in sorted(bench.times_ms):
        _print_row(name, bench.times_ms[name], bench.passed_ms[name])
    decisions = [name for name in bench.times_ms if name not in MEASUREMENTS]
    _print_row(
        "decisions", _together(bench.times_ms, decisions), _together(bench.passed_ms, decisions)
    )
    slow = [
        name
        for name, times_ms in sorted(bench.times_ms.items())
        if name != "stepped" and _p99(times_ms) > LIMIT_MS
    ]
    if slow:
        sys.exit(f"more than {LIMIT_MS} ms at p99: {', '.join(slow)}")


def _together(times_ms: Mapping[str, list[float]], names: Iterable[str]) -> list[float]:
    return list(chain.from_iterable(times_ms[name] for name in names))


def _print_row(name: str, times_ms: list[float], passed_ms: list[float]) -> None:
    figures = f"{statistics.median(times_ms):>8.4f} {_p99(times_ms):>8.4f} {max(times_ms):>8.4f}"
    print(f"{name:>12} {len(times_ms):>8} {figures} {_p99(passed_ms):>11.4f}")


if __name__ == "__main__":
    main()
