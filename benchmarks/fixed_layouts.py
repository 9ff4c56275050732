"""Two engines with a link limited by bytes: when together is better, and when apart is.

python -m benchmarks.fixed_layouts [--shares 0.1 0.85] [--seconds 120 60]

Fixed layouts alone, at shares of the capacity of engines apart. The plan is in
experiments/plans/live.md: it says when the link is accepted for `benchmarks.quiet_and_bursts`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.link_verdict import HIGH, LOW, phase, verdict
from benchmarks.live_report import FIXED, table
from benchmarks.policies import LINKS, server
from benchmarks.rounds import BENCH, Lengths, Rows, add, capacity_rps, keep, replayed, steady
from benchmarks.systems import ROOT
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

MODEL = "llama-75m"
REGIME = "bytes"
LENGTHS: Lengths = {"prompt_tokens": (256, 1024), "output_tokens": (8, 24)}
OUT = BENCH / "live_fixed_layouts.json"


def run(args: argparse.Namespace) -> tuple[float, Rows]:
    """Return the capacity of engines apart, and the rows."""
    model = make_model(ROOT / ".models" / MODEL, MODEL)
    rows: Rows = {}
    capacity = 0.0
    for name in FIXED:
        with server(name, REGIME, model) as system:
            if name == FIXED[0]:
                capacity = capacity_rps(system, LENGTHS, args.requests)
                print(f"capacity of {name}: {capacity:.2f} requests/s", flush=True)
            for share, seconds in zip(args.shares, args.seconds, strict=True):
                load = steady(share * capacity, seconds, LENGTHS, args.seed, phase(share))
                add(rows, name, replayed(system, load))
    return capacity, rows


def main() -> None:
    """Run the loads, keep all rows, print the table and the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[LOW, HIGH])
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[120.0, 60.0], help="at each of the shares"
    )
    parser.add_argument("--requests", type=int, default=256, help="that find the capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if len(args.seconds) != len(args.shares):
        parser.error(
            f"--seconds: {len(args.seconds)} values, allowed: {len(args.shares)} as --shares"
        )
    capacity, rows = run(args)
    kept = keep(args.out, vars(args) | {"capacity_rps": capacity, "link": LINKS[REGIME]}, rows)
    print(table(kept))
    if {LOW, HIGH} <= set(args.shares):
        print(verdict(kept))


if __name__ == "__main__":
    with ended_by_signals():
        main()
