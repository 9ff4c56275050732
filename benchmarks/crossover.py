"""A load at which engines apart and together are about as good, held for minutes; then bursts out
of idleness.

python -m benchmarks.crossover [--regime link] [--seconds 300] [--bursts 3]

The rate is the one at which the costs of steps that the server has measured at its start give both
layouts the same figure (request-seconds, by which policies decide). How often does `auto` switch?
And with how many requests at once after some seconds of idleness: how long after the first of them
is sent is the layout asked for, and made?
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from typing import Any

import httpx
from scipy.optimize import brentq

from benchmarks.client import prompt
from benchmarks.policies import FLAGS, LENGTHS, LINKS, OBJECTIVE, OUT, REGIMES, flag
from benchmarks.systems import ROOT, System
from flying_lab.bench.client import Target
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import measure, probe
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.files import save
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.layout.groups import Layout
from flying_serving.predict.forecast import evaluate, first_per_s, forecast
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures, Work

ENGINES, MAX_NUM_SEQS, STEP_TOKENS = (
    flag("data-parallel-size"),
    flag("max-num-seqs"),
    flag("max-num-batched-tokens"),
)
PROMPT_TOKENS, OUTPUT_TOKENS = sum(LENGTHS["prompt_tokens"]) / 2, sum(LENGTHS["output_tokens"]) / 2
BURST, IDLE_S = 24, 20.0


def predicted(rate: float, size: int, lanes: dict[int, LaneFigures]) -> float:
    """Request-seconds of a layout with as many requests running as that rate keeps there."""
    work = Work(rate, PROMPT_TOKENS, OUTPUT_TOKENS, 0.0)
    for _ in range(20):
        seen = forecast(lanes[size], ENGINES // size, work, OBJECTIVE)
        running = min(ENGINES // size * MAX_NUM_SEQS, rate * work.output_tokens * seen.tpot_s)
        work = Work(rate, work.prompt_tokens, work.output_tokens, 0.0, running)
    return evaluate(Layout.uniform(ENGINES, size), lanes, work, OBJECTIVE)


def crossover(status: dict[str, Any]) -> float:
    """Requests per second at which both layouts have the same figure.

    Raises:
        ValueError: one of them is better at every rate.
    """
    lanes = {
        int(size): LaneFigures(
            StepCost(**cost), MAX_NUM_SEQS, status["capacity_tokens"][size], STEP_TOKENS
        )
        for size, cost in status["step_cost"].items()
    }
    most = first_per_s(lanes[1], ENGINES, Work(1.0, PROMPT_TOKENS, OUTPUT_TOKENS, 0.0))
    return float(
        brentq(lambda rate: predicted(rate, 1, lanes) - predicted(rate, ENGINES, lanes), 0.02, most)
    )


def hold(system: System, rate: float, seconds: float) -> list[dict[str, Any]]:
    """Arrivals at that rate for so long. Returns the switches of that time."""
    workload = synthesise(Poisson(requests=None, duration_s=seconds, rate_rps=rate, **LENGTHS), 1)
    save(workload, OUT / "crossover.jsonl")
    target, settings = Target(system.url), BenchOptions(token_ids=(300, 499))
    before = len(system.ask("switches")["switches"])
    results = measure(workload, target, probe(target, settings), settings)
    failed = int(sum(~results.ok))
    print(
        f"{len(workload.requests)} requests at {rate:.2f}/s for {seconds:.0f} s, {failed} not "
        "completed"
    )
    made: list[dict[str, Any]] = system.ask("switches")["switches"][before:]
    for switch in made:
        print(f"  {switch['time'] - results.run.started_wall_s:6.1f} s {described(switch)}")
    return made


def described(switch: dict[str, Any]) -> str:
    """One line."""
    return f"{switch['from']} -> {switch['to']} by {switch['mode']} ({switch['reason']})"


async def burst(system: System, number: int) -> None:
    """Many requests at once: print when the first switch after that was asked for, and when it was
    made.
    """
    before = len(system.ask("switches")["switches"])
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as client:
        sent_s = time.time()
        bodies = (
            {
                "model": system.model,
                "prompt": prompt(256, BURST * number + n),
                "max_tokens": 48,
                "ignore_eos": True,
            }
            for n in range(BURST)
        )
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in bodies)
        )
    served = sum(answer.status_code == 200 for answer in answers)
    made = system.ask("switches")["switches"][before:]
    text = "no switch"
    if made:
        first = made[0]
        asked_ms, step_ms = (first["time"] - sent_s) * 1e3, first["in_flight_step_ms"]
        text = (
            f"asked {asked_ms:.0f} ms after the first was sent, there {first['cutover_ms']:.0f} "
            "ms later, "
            f"{step_ms:.0f} of it a step in flight: {described(first)}"
        )
    print(f"burst of {BURST} after {IDLE_S:.0f} s of idleness, {served} served: {text}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regime", choices=REGIMES, default="link")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--bursts", type=int, default=3)
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    flags = [*FLAGS, *REGIMES[args.regime], "--policy=auto"]
    system = System("auto", model, flags, ours=True, link=LINKS.get(args.regime))
    try:
        made = hold(system, crossover(system.ask("status")), args.seconds)
        minutes = [int((switch["time"] - made[0]["time"]) // 60) for switch in made]
        most = max((len(list(run)) for _, run in itertools.groupby(minutes)), default=0)
        mean = len(made) / args.seconds * 60
        print(f"{mean:.1f} switches a minute, {most} in one minute at most (bar 2)", flush=True)
        for number in range(args.bursts):
            time.sleep(IDLE_S)
            print(f"layout before: {system.ask('status')['layout']}; ", end="")
            asyncio.run(burst(system, number))
    finally:
        system.stop()


if __name__ == "__main__":
    with ended_by_signals():
        main()
