"""Four emulated engines: urgent requests among others, by layout and policy.

python -m benchmarks.urgent_requests [--shares 0.4 0.7] [--seconds 40] [--rounds 1]

Policy `load` is `auto` without the rule for urgent requests. The plan is in
experiments/plans/live.md. All times are given as on the devices. One server runs at a time, started
anew in each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from benchmarks import flags
from benchmarks.emulated import served
from benchmarks.live_report import WHOLE, table
from benchmarks.long_prompts import devices_of
from benchmarks.rounds import (
    BENCH,
    Lengths,
    Rows,
    add,
    begun,
    keep,
    replayed,
    rotated,
    steady,
)
from flying_lab.signals import ended_by_signals
from flying_lab.workload.model import Workload
from flying_lab.workload.shape import scale_time, with_priority

LENGTHS: Lengths = {"prompt_tokens": (128, 4000), "output_tokens": (64, 512)}
CAPACITY_RPS = 10.1
"""Of data parallelism with these lengths on these devices: experiments/plans/phases.md."""
URGENT_SHARE = 1 / 6
SYSTEMS = ("static-tp", "static-dp", "auto", "load")
OUT = BENCH / "live_urgent_requests.json"


def workload_of(share: float, args: argparse.Namespace, seed: int) -> Workload:
    """Return the load of a share on this machine's clock; urgent requests and others are its
    phases.
    """
    load = steady(share * args.capacity_rps, args.seconds, LENGTHS, seed, "")
    mixed = with_priority(load, URGENT_SHARE)
    marked = mixed.having(
        replace(request, phase=f"{share:g}, {'urgent' if request.priority else 'others'}")
        for request in mixed.requests
    )
    return scale_time(marked, args.slowdown)


def run(args: argparse.Namespace) -> Iterator[Rows]:
    """Yield the rows so far, after each system of each round."""
    devices = devices_of(args.slowdown, args.execution)
    rows: Rows = {}
    for number in range(args.rounds):
        for name in rotated(args.systems, number):
            with served(name, devices, f"--policy={name}") as system:
                for share in args.shares:
                    load = workload_of(share, args, args.seed + number)
                    whole = f"{share:g}, {WHOLE}"
                    add(rows, name, replayed(system, load), args.slowdown, whole)
            yield rows


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, by default of this process's."""
    parser = flags.emulated(__doc__, SYSTEMS, 1, OUT)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.7])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--capacity-rps", type=float, default=CAPACITY_RPS)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the rounds, keep the rows after each system, print the table."""
    args = options()
    kept: dict[str, Any] = {}
    for rows in run(args):
        settings = vars(args) | {"devices": "emulated", "rounds": begun(rows)}
        kept = keep(args.out, settings, rows)
    print(table(kept))


if __name__ == "__main__":
    with ended_by_signals():
        main()
