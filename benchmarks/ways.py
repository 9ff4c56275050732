"""Tensor beside token parallel steps of one group, with a real model.

python -m benchmarks.ways [--engines 2 4] [--rounds 3]

Our server as one group of all engines: *tensor* with `--no-token-parallel`, *token* as it is by
default, where each step takes the way that was faster at the start. Prompts come one at a time, and
many at once. All servers of a size run at once, and are stopped while another one is measured. The
plan is in experiments/plans/live.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from benchmarks import flags
from benchmarks.fixed_layouts import MODEL
from benchmarks.live_report import spread
from benchmarks.policies import SHARED
from benchmarks.rounds import AT_ONCE_RPS, BENCH, Rows, add, keep, replayed, rotated
from benchmarks.systems import ROOT, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise

WAYS = {"tensor": ["--no-token-parallel"], "token": []}
LENGTHS = {"prompt_tokens": (256, 1024), "output_tokens": (8, 24)}
ALONE, AT_ONCE = "one at a time", "many at once"
ALONE_RPS, ALONE_REQUESTS, AT_ONCE_REQUESTS = 0.4, 16, 64
STEP_TOKENS = 1024
OUT = BENCH / "live_ways.json"
FIGURES = ("mean_ttft_ms", "mean_tpot_ms", "total_token_throughput")
"""The last is tokens of prompts and outputs per second."""


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
                    rates = rows.setdefault((one.name, phase, FIGURES[-1]), [])
                    rates.append(summary[FIGURES[-1]])
                    one.pause()


def table(rows: Rows, names: Sequence[str]) -> str:
    """Return medians over rounds, and the rounds' ratios to the first system."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, phase, figure), each in rows.items():
        if figure in FIGURES:
            way, _, size = name.partition(", ")
            first = rows[f"{names[0]}, {size}", phase, figure]
            shown = "" if way == names[0] else f", {spread(_ratios(each, first), 3)} of {names[0]}"
            found[name, phase].append(f"{figure} {spread(each, 1)}{shown}")
    return "\n".join(
        f"{name}, {phase}: {'; '.join(cells)}" for (name, phase), cells in found.items()
    )


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
        keep(args.out, vars(args), rows)
    print(table(rows, args.systems))


if __name__ == "__main__":
    with ended_by_signals():
        main()
