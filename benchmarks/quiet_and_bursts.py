"""Two engines with a real model: `auto` and fixed layouts in quiet phases and bursts.

python -m benchmarks.quiet_and_bursts [--phases 100 40 60] [--cycles 1] [--rounds 3]

Rates are shares of the capacity that `benchmarks.fixed_layouts` found and kept. The link between
engines is limited by bytes if that accepted it; otherwise there is no emulated link. All servers
run at once, and are stopped while another one is measured. The plan is in
experiments/plans/live.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import flags
from benchmarks.fixed_layouts import LENGTHS, MODEL, REGIME
from benchmarks.link_verdict import is_accepted
from benchmarks.live_report import read, summary, table
from benchmarks.policies import server
from benchmarks.rounds import BENCH, NUMBERS, Rows, add, keep, phased, replayed, rotated
from benchmarks.systems import ROOT, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Alternating

FIXED_LAYOUTS = NUMBERS / "live_fixed_layouts.json"
SYSTEMS = ("stock-dp", "static-dp", "static-tp", "auto")
BARE = "shm"
"""The regime without an emulated link."""
OUT = BENCH / "live_quiet_and_bursts.json"


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """Return the load of a round: cycles of low phase and burst, then the last low phase."""
    low_s, burst_s, last_s = args.phases
    low_share, burst_share = args.shares
    return phased(
        Alternating(
            duration_s=args.cycles * (low_s + burst_s) + last_s,
            low_rate_rps=low_share * args.capacity_rps,
            burst_rate_rps=burst_share * args.capacity_rps,
            low_s=low_s,
            burst_s=burst_s,
            **LENGTHS,
        ),
        seed,
    )


def run(args: argparse.Namespace, load_of: Callable[[int], Workload]) -> Rows:
    """Return the rows of all rounds.

    `load_of`: returns the load of the round with this seed.
    """
    model = make_model(ROOT / ".models" / MODEL, MODEL)
    rows: Rows = {}
    with Systems() as systems:
        started = {name: systems.start(server(name, args.regime, model)) for name in args.systems}
        for number in range(args.rounds):
            load = load_of(args.seed + number)
            for name in rotated(args.systems, number):
                started[name].resume()
                add(rows, name, replayed(started[name], load))
                started[name].pause()
            keep(args.out, vars(args) | {"rounds": number + 1}, rows)
    return {key: rows[key] for name in args.systems for key in rows if key[0] == name}


def options() -> argparse.Namespace:
    """Return the command line's options, with capacity and regime from the rows that are kept."""
    parser = flags.comparison(__doc__, SYSTEMS, 3, OUT)
    parser.add_argument(
        "--phases", type=float, nargs=3, default=(100.0, 40.0, 60.0), help="low, burst, last low"
    )
    parser.add_argument("--shares", type=float, nargs=2, default=(0.12, 0.85))
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--capacity-rps", type=float, help="of static-dp, in place of the kept one")
    parser.add_argument("--regime", choices=(BARE, REGIME), help="in place of the verdict's")
    parser.add_argument("--fixed-layouts", type=Path, default=FIXED_LAYOUTS)
    args = parser.parse_args()
    if args.capacity_rps is None or args.regime is None:
        kept = read(args.fixed_layouts)
        args.capacity_rps = args.capacity_rps or kept["settings"]["capacity_rps"]
        args.regime = args.regime or (REGIME if is_accepted(kept) else BARE)
    args.fixed_layouts = args.fixed_layouts.name
    return args


def main() -> None:
    """Run the rounds, keep all rows, print both tables."""
    args = options()
    print(f"capacity {args.capacity_rps:.2f} requests/s, regime {args.regime}", flush=True)
    rows = run(args, partial(workload_of, args))
    kept = keep(args.out, vars(args), rows)
    print(f"{table(kept)}\n\n{summary(kept)}")


if __name__ == "__main__":
    with ended_by_signals():
        main()
