"""Two engines with a real model: `auto` and fixed layouts on a window of a trace.

python -m benchmarks.live_trace [--window 0 235] [--rounds 5]

Times of arrivals are those of the trace, times `--time-scale`, and lengths are in proportion. The
tokens are other ones in each round. All servers run at once, and are stopped while another one is
measured. The plan is in experiments/plans/live.md.
"""

from __future__ import annotations

import argparse
from functools import partial

from msgspec.structs import replace

from benchmarks import flags
from benchmarks.live_report import by_round, summary, table
from benchmarks.quiet_and_bursts import BARE, SYSTEMS, run
from benchmarks.rounds import BENCH, keep
from benchmarks.systems import ROOT
from flying_lab.signals import ended_by_signals
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.shape import scale_lengths, scale_time, window

TRACE = "experiments/data/traces/mooncake_conversation.jsonl"
PHASE = "trace"
OUT = BENCH / "live_trace.json"


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """Return the window of the trace at this machine's scale; the seed is that of its tokens."""
    part = window(read_workload(ROOT / args.trace), *args.window)
    scaled = scale_lengths(part, prompt=args.prompt_scale, output=args.output_scale)
    timed = scale_time(scaled, args.time_scale)
    return replace(timed.having(replace(one, phase=PHASE) for one in timed.requests), seed=seed)


def options() -> argparse.Namespace:
    """Return the command line's options; there is no emulated link."""
    parser = flags.comparison(__doc__, SYSTEMS[1:], 5, OUT)
    parser.add_argument("--trace", default=TRACE, help="a file below the repository's root")
    parser.add_argument(
        "--window", type=float, nargs=2, default=(0.0, 235.0), help="from, to, in s"
    )
    parser.add_argument("--time-scale", type=float, default=0.6)
    parser.add_argument("--prompt-scale", type=float, default=0.015)
    parser.add_argument("--output-scale", type=float, default=0.05)
    return parser.parse_args(namespace=argparse.Namespace(regime=BARE))


def main() -> None:
    """Run the rounds, keep all rows, print the tables."""
    args = options()
    kept = keep(args.out, vars(args), run(args, partial(workload_of, args)))
    print(f"{table(kept)}\n\n{summary(kept)}\n\n{by_round(kept)}")


if __name__ == "__main__":
    with ended_by_signals():
        main()
