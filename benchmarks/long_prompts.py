"""Four emulated engines: long prompts that only all engines hold, beside short requests.

python -m benchmarks.long_prompts [--seconds 45] [--share 0.5] [--rounds 1]

Fixed layouts, an operator that goes together for each long prompt (`unaware, live`), and policies.
The plan is in experiments/plans/live.md. All times are given as on the devices. One server runs at
a time, started anew in each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from msgspec.structs import replace

from benchmarks import flags
from benchmarks.context import LIVE, Operator
from benchmarks.emulated import HARDWARE, served
from benchmarks.live_report import LONG, table
from benchmarks.rounds import (
    BENCH,
    Lengths,
    Rows,
    add,
    begun,
    capacity_rps,
    keep,
    replayed,
    rotated,
    steady,
)
from benchmarks.systems import System
from flying_lab.emulation.command import profile
from flying_lab.emulation.profile import Profile
from flying_lab.emulation.stand_in import BLOCK_TOKENS, kv_bytes
from flying_lab.signals import ended_by_signals
from flying_lab.sim import machine
from flying_lab.workload.model import Workload
from flying_lab.workload.shape import scale_time, with_long_prompts

MODEL = "llama-3-70b"
LENGTHS: Lengths = {"prompt_tokens": (128, 512), "output_tokens": (64, 256)}
SHORT = "short"
LONG_TOKENS, LONG_OUTPUTS = 28_000, 64
"""Of a long request, by default."""
KV_TOKENS, MOST_TOKENS = 12_288, 30_000
"""Tokens of KV that an engine holds, and of a request at most."""
POLICIES = {
    "static-dp": "static-dp",
    "static-tp": "static-tp",
    LIVE: "manual",
    "context": "context",
    "gyges": "gyges",
    "auto": "auto",
}
"""The value of `--policy`, by system."""
USUAL = ("static-dp", "static-tp", LIVE, "auto")
OUT = BENCH / "live_long_prompts.json"


def devices_of(slowdown: float, execution: str) -> Profile:
    """Return the emulated devices of four engines."""
    return profile(
        {
            "hardware": HARDWARE,
            "model": MODEL,
            "execution": execution,
            "slowdown": slowdown,
            "devices_per_engine": None,
        }
    )


def memory_flags(name: str, devices: Profile) -> list[str]:
    """Return the flags of engines that hold `KV_TOKENS` and a block each.

    Engines that stay apart have to start with the length that one of them holds.
    """
    longest = KV_TOKENS if name == "static-dp" else MOST_TOKENS
    token_bytes = kv_bytes(devices) // (devices.blocks() * machine.BLOCK_TOKENS)
    kv = (KV_TOKENS + BLOCK_TOKENS) * token_bytes
    return [f"--kv-cache-memory-bytes={kv}", f"--max-model-len={longest}"]


def started(name: str, devices: Profile) -> System:
    """Start one system."""
    return served(name, devices, f"--policy={POLICIES[name]}", *memory_flags(name, devices))


def loads(args: argparse.Namespace, capacity: float, seed: int) -> tuple[Workload, Workload]:
    """Return the short requests, and the same with long prompts among them, on this machine's
    clock.
    """
    short = steady(args.share * capacity, args.seconds, LENGTHS, seed, SHORT)
    mixed = with_long_prompts(short, args.long_tokens, args.long_outputs, args.every)
    marked = mixed.having(
        replace(request, phase=LONG if request.prompt_tokens == args.long_tokens else SHORT)
        for request in mixed.requests
    )
    return scale_time(short, args.slowdown), scale_time(marked, args.slowdown)


def operated(system: System, short: Workload, mixed: Workload, args: argparse.Namespace) -> Rows:
    """Replay the short requests while an operator serves the long ones. Returns the rows."""
    longs = [request for request in mixed.requests if request.phase == LONG]
    engines = len(system.ask("status")["layout"])
    operator = Operator(system, longs, engines, live=True)
    operator.start()
    summary = replayed(system, short)
    operator.finish()
    rows: Rows = {}
    add(rows, system.name, summary, args.slowdown)
    rows[system.name, LONG, "completed"] = [operator.served / len(longs)]
    if operator.latencies_s:
        latency_ms = 1e3 * mean(operator.latencies_s) / args.slowdown
        rows[system.name, LONG, "mean_e2el_ms"] = [latency_ms]
    return rows


def run(args: argparse.Namespace) -> Iterator[tuple[float, Rows]]:
    """Yield the capacity of engines apart, and the rows so far, after each system of each round."""
    devices = devices_of(args.slowdown, args.execution)
    rows: Rows = {}
    with started("static-dp", devices) as system:
        capacity = capacity_rps(system, LENGTHS, args.requests) * args.slowdown
    print(f"capacity of static-dp: {capacity:.2f} requests/s", flush=True)
    for number in range(args.rounds):
        short, mixed = loads(args, capacity, args.seed + number)
        for name in rotated(args.systems, number):
            with started(name, devices) as system:
                found: Rows = {}
                if name == LIVE:
                    found = operated(system, short, mixed, args)
                else:
                    add(found, name, replayed(system, mixed), args.slowdown)
            for key, values in found.items():
                rows.setdefault(key, []).extend(values)
            yield capacity, rows


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, by default of this process's."""
    parser = flags.emulated(__doc__, POLICIES, 1, OUT)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--share", type=float, default=0.5, help="of capacity: short requests")
    parser.set_defaults(systems=list(USUAL))
    parser.add_argument("--long-tokens", type=int, default=LONG_TOKENS, help="of a long prompt")
    parser.add_argument("--long-outputs", type=int, default=LONG_OUTPUTS, help="of its output")
    parser.add_argument("--every", type=float, default=15.0, help="seconds for each long prompt")
    parser.add_argument("--requests", type=int, default=300, help="that find the capacity")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the rounds, keep the rows after each system, print the table."""
    args = options()
    kept: dict[str, Any] = {}
    for capacity, rows in run(args):
        found = {"capacity_rps": capacity, "devices": "emulated", "rounds": begun(rows)}
        kept = keep(args.out, vars(args) | found, rows)
    print(table(kept))


if __name__ == "__main__":
    with ended_by_signals():
        main()
