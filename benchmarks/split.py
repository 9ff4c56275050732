"""Requests that two engines share, beside stock vLLM, disaggregated serving and whole requests:
requests/s at a target.

python -m benchmarks.split [--rounds 3] [--seconds 8] [--load 0.8]

`colocated`: stock vLLM, data parallel, prompts in chunks that fit the target. `whole`,
`disaggregated`: our server with policy `manual`, engines apart; `disaggregated` has every request
split at its prompt's end. Any engine may prefill: the one that is predicted to give the first token
sooner, and the other one decodes. `split`: our policy. Our servers have the target as
`--tbt-slo-ms`, and know each output's length (`expected_tokens`).

Shapes are named by the time that prefill takes to the time that decode takes, as an engine's share:
of a decode step BATCH requests have one BATCHth each. A server that is stopped again measures what
steps cost; lengths, target, chunk and rates follow from that before the first request is sent. The
target is STEPS decode steps of BATCH requests. The rate is `--load` of what two engines can do if
nothing but steps takes time: on two cores the client and the API server take their time as well.

A request is at the target if all gaps between its tokens are; requests/s are counted until the last
one has ended.
"""

import argparse
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import Arrival, Stream, poisson, prompt, run_streams, serve_arrivals
from benchmarks.steady_state import FLAGS
from benchmarks.systems import DP, ROOT, System, Systems, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_serving.predict.steps import StepCost

ENGINES, BATCH, STEPS = 2, 8, 4
BLOCK_TOKENS = 32
SHAPES = {"12:1": (768, 12.0), "1:2": (128, 1 / 2), "1:20": (16, 1 / 20)}
"""By name: prompt tokens, and seconds of prefill to seconds of decode."""
MIX = "mix"
_seeds = itertools.count(1)


@dataclass(frozen=True)
class Lengths:
    """Of the requests of a shape, with the seconds of an engine that one takes."""

    prompt_tokens: int
    output_tokens: int
    engine_s: float


@dataclass(frozen=True)
class Planned:
    """What is decided before the first request: `chunk_tokens` is stock vLLM's, lengths are by
    shape.
    """

    target_s: float
    chunk_tokens: int
    lengths: dict[str, Lengths]

    def rate(self, shape: str, load: float) -> float:
        """Requests per second."""
        mine = [each for name, each in self.lengths.items() if shape in (name, MIX)]
        return load * ENGINES * len(mine) / sum(each.engine_s for each in mine)

    def arrivals(
        self, shape: str, load: float, seconds: float, seed: int
    ) -> list[tuple[float, Lengths]]:
        """Times and lengths, the first at once; of the mix each as often as the others."""
        draw = random.Random(seed)
        mine = [each for name, each in self.lengths.items() if shape in (name, MIX)]
        return [
            (at_s, draw.choice(mine))
            for at_s in (0.0, *poisson(self.rate(shape, load), seconds, seed))
        ]


@dataclass(frozen=True)
class Run:
    """A way to serve: `splits` says that requests ask for it, at their prompt's end."""

    name: str
    system: System
    splits: bool = False

    def serve(self, arrivals: Sequence[tuple[float, Lengths]]) -> list[Stream]:
        """Send the requests, each with a prompt of its own."""
        requests = []
        for at_s, lengths in arrivals:
            xargs = {"expected_tokens": lengths.output_tokens} if self.system.ours else None
            if self.splits and xargs is not None:
                xargs["split_at"] = lengths.prompt_tokens
            token_ids = prompt(lengths.prompt_tokens, next(_seeds))
            requests.append(Arrival(at_s, token_ids, lengths.output_tokens, xargs))
        return serve_arrivals(self.system.url, self.system.model, requests)

    def splits_so_far(self) -> int:
        """Requests that its server has split since its start."""
        counts = (
            self.system.ask("status")["splits"] if self.system.ours else {"prompt": 0, "output": 0}
        )
        return int(counts["prompt"] + counts["output"])


def plan(cost: StepCost) -> Planned:
    """Target, chunk and lengths from what steps cost with nothing else to do."""
    step_s = cost.step_s(0, BATCH, 0)
    target_s = math.ceil(STEPS * step_s * 100) / 100
    room_tokens = (target_s - step_s) / cost.prefill_token_s
    lengths = {}
    for name, (tokens, ratio) in SHAPES.items():
        prefill_s = cost.prefill_token_s * tokens + cost.prefill_pair_s * tokens**2 / 2
        outputs = max(2, round(prefill_s / ratio / (step_s / BATCH)))
        lengths[name] = Lengths(tokens, outputs, prefill_s + outputs * step_s / BATCH)
    return Planned(target_s, max(1, math.floor(room_tokens / BLOCK_TOKENS)) * BLOCK_TOKENS, lengths)


def step_cost(model: Path) -> StepCost:
    """What steps of an engine cost, as a server has learned it: at its start, and from a few
    requests.
    """
    system = System("probe", model, [*FLAGS, DP, "--policy=manual"], ours=True)
    try:
        for prompt_tokens in (16, 512):
            run_streams(
                system.url,
                system.model,
                [prompt(prompt_tokens, next(_seeds)) for _ in range(2 * BATCH)],
                32,
            )
        return StepCost(**system.ask("status")["step_cost"]["1"])
    finally:
        system.stop()


def start(systems: Systems, model: Path, planned: Planned) -> list[Run]:
    """Start all servers."""
    ours = [*FLAGS, DP, f"--tbt-slo-ms={planned.target_s * 1e3:.0f}"]
    stock = [*FLAGS, DP, f"--max-num-batched-tokens={planned.chunk_tokens}"]
    colocated = systems.start(System("colocated", model, stock, ours=False))
    apart = systems.start(System("apart", model, [*ours, "--policy=manual"], ours=True))
    split = systems.start(System("split", model, [*ours, "--policy=split"], ours=True))
    return [
        Run("colocated", colocated),
        Run("disaggregated", apart, splits=True),
        Run("whole", apart),
        Run("split", split),
    ]


def figures(streams: Sequence[Stream], target_s: float) -> dict[str, float]:
    """Requests/s at the target and in all, the share of gaps within it in %, and median TTFT and
    longest gap in ms.
    """
    gaps = [[b - a for a, b in itertools.pairwise(each.token_s)] for each in streams]
    seconds = max(each.token_s[-1] for each in streams) - min(each.sent_s for each in streams)
    every = list(itertools.chain.from_iterable(gaps))
    return {
        "at target/s": sum(max(each) <= target_s for each in gaps) / seconds,
        "requests/s": len(streams) / seconds,
        "within %": 100 * sum(gap <= target_s for gap in every) / len(every),
        "longest ms": 1e3 * max(every),
        "TTFT ms": 1e3 * median(each.ttft_s for each in streams),
    }


def measure(
    runs: Sequence[Run], planned: Planned, options: argparse.Namespace
) -> dict[tuple[str, str], Any]:
    """Figures of each round by shape and run; every run in turn gets the same arrivals, the others
    are stopped.
    """
    rows: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for number, shape in itertools.product(range(options.rounds), (*planned.lengths, MIX)):
        arrivals = planned.arrivals(shape, options.load, options.seconds, number)
        for run in reversed(runs) if number % 2 else runs:
            run.system.resume()
            before = run.splits_so_far()
            found = figures(run.serve(arrivals), planned.target_s)
            found["split %"] = 100 * (run.splits_so_far() - before) / len(arrivals)
            run.system.pause()
            rows[shape, run.name].append(found)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            print(
                f"round {number}, {shape}, {run.name}: {len(arrivals)} requests, {shown}",
                flush=True,
            )
    return rows


def report(rows: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    """Medians with the smallest and the largest, then requests/s at the target of `split` over the
    others.
    """
    for (shape, name), found in rows.items():
        cells = []
        for column in found[0]:
            values = [row[column] for row in found]
            cells.append(f"{column} {median(values):.4g} [{min(values):.4g}..{max(values):.4g}]")
        print(f"{shape:5}{name:14}" + "  ".join(cells))
    for shape, name in rows:
        if name == "split":
            continue
        pairs = zip(rows[shape, "split"], rows[shape, name], strict=True)
        ratios = [mine["at target/s"] / max(1e-9, other["at target/s"]) for mine, other in pairs]
        print(
            f"{shape:5}split / {name}: {median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
        )


def main() -> None:
    """Plan, start, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of arrivals, of each shape with each server"
    )
    parser.add_argument("--load", type=float, default=0.8, help="share of what the engines can do")
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    cost = step_cost(model)
    planned = plan(cost)
    print(
        f"{commit()}: a step of {BATCH} takes {cost.step_s(0, BATCH, 0) * 1e3:.0f} ms, a prompt "
        "token "
        f"{cost.prefill_token_s * 1e3:.2f} ms; target {planned.target_s * 1e3:.0f} ms, chunk "
        f"{planned.chunk_tokens}"
    )
    for name, each in planned.lengths.items():
        print(
            f"{name}: {each.prompt_tokens} + {each.output_tokens} tokens, {each.engine_s:.2f} s "
            "of an engine"
        )
    rates = ", ".join(
        f"{shape} {planned.rate(shape, options.load):.2f}" for shape in (*planned.lengths, MIX)
    )
    print(f"requests/s sent: {rates}", flush=True)
    with Systems() as systems:
        report(measure(start(systems, model, planned), planned, options))


if __name__ == "__main__":
    with ended_by_signals():
        main()
