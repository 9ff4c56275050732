"""Tensor beside token parallel steps of one group, with a real model.

python -m benchmarks.ways [--engines 2 4] [--rounds 3]

Our server as one group of all engines: *tensor* with `--no-token-parallel`, *token* as it is by
default, where each step takes the way that was faster at the start. Prompts come one at a time, and
many at once. All servers of a size run at once, and are stopped while another one is measured. The
plan is in experiments/plans/live.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from benchmarks import flags
from benchmarks.fixed_layouts import MODEL
from benchmarks.live_report import spread, values
from benchmarks.policies import SHARED
from benchmarks.rounds import AT_ONCE_RPS, BENCH, Rows, add, keep, replayed, rotated
from benchmarks.systems import ROOT, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise

TENSOR, TOKEN = "tensor", "token"
WAYS = {TENSOR: ["--no-token-parallel"], TOKEN: []}
LENGTHS = {"prompt_tokens": (256, 1024), "output_tokens": (8, 24)}
ALONE, AT_ONCE = "one at a time", "many at once"
ALONE_RPS, ALONE_REQUESTS, AT_ONCE_REQUESTS = 0.4, 16, 64
STEP_TOKENS = 1024
OUT = BENCH / "live_ways.json"
RATE = "total_token_throughput"
FIGURES = {
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
    RATE: "tokens of prompts and outputs per second",
}


def loads(seed: int) -> dict[str, Workload]:
    """Return both loads of a round, by phase."""
    found = {}
    for phase, rate_rps, requests in (
        (ALONE, ALONE_RPS, ALONE_REQUESTS),
        (AT_ONCE, AT_ONCE_RPS, AT_ONCE_REQUESTS),
    ):
        made = synthesise(Poisson(requests=requests, rate_rps=rate_rps, **LENGTHS), seed)
        found[phase] = made.having(replace(one, phase=phase) for one in made.requests)
    return found


def server(name: str, engines: int) -> System:
    """Start our server as one group."""
    model = make_model(ROOT / ".models" / MODEL, MODEL)
    shared = [flag for flag in SHARED if not flag.startswith("--max-num-batched-tokens")]
    sizes = [f"--data-parallel-size={engines}", f"--max-num-batched-tokens={STEP_TOKENS}"]
    own = [*sizes, *shared, "--policy=static-tp", *WAYS[name]]
    return System(f"{name}, {engines} engines", model, own, ours=True)


def measure(rows: Rows, engines: int, args: argparse.Namespace) -> None:
    """Add the rows of all rounds with this many engines."""
    with Systems() as systems:
        started = {name: systems.start(server(name, engines)) for name in args.systems}
        for number in range(args.rounds):
            for phase, load in loads(args.seed + number).items():
                for name in rotated(args.systems, number):
                    one = started[name]
                    one.resume()
                    summary = replayed(one, load)
                    add(rows, one.name, summary | {"phases": {}}, whole=phase)
                    rows.setdefault((one.name, phase, RATE), []).append(summary[RATE])
                    one.pause()


def table(kept: Mapping[str, Any]) -> str:
    """Return a row for each number of engines, load and figure: both ways, medians over rounds with
    [smallest..largest], and the ratio of *token* over *tensor* by round.
    """
    found = values(kept)
    lines = ["| engines | requests | figure | tensor | token | token / tensor |", "|---" * 6 + "|"]
    for name, phase, figure in found:
        way, _, size = name.partition(", ")
        if way == TENSOR and figure in FIGURES:
            tensor, token = found[name, phase, figure], found[f"{TOKEN}, {size}", phase, figure]
            cells = spread(tensor, 1), spread(token, 1), spread(_ratios(token, tensor), 3)
            lines.append(f"| {' | '.join([size.split()[0], phase, FIGURES[figure], *cells])} |")
    return "\n".join(lines)


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def main() -> None:
    """Run the rounds with each number of engines, keep all rows, print the table."""
    parser = flags.comparison(__doc__, WAYS, 3, OUT)
    parser.add_argument("--engines", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    args = parser.parse_args()
    rows: Rows = {}
    for engines in args.engines:
        measure(rows, engines, args)
        kept = keep(args.out, vars(args), rows)
    print(table(kept))


if __name__ == "__main__":
    with ended_by_signals():
        main()
