"""`make demo`: engines that merge and split while requests stream. Ends by itself.

First, a tiny model runs on the CPU: two engines share a request, and an operator changes the layout
while requests stream. Then the server decides, on emulated devices: a burst between two quiet
phases, with each fixed layout and with policy `auto`. Exit code 0 means that every request got all
its tokens and every ordered switch was made. Tokens are the same in every layout of the tiny model,
and its block bookkeeping is consistent. The claims of docs/benchmarks.md hold.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
from rich.console import Console

import flying_lab
from flying_lab.bench.view import lag_warning
from flying_lab.demo import burst, layouts
from flying_lab.demo.server import Shown
from flying_lab.errors import BenchError
from flying_lab.server_process import CPU_ENVIRONMENT
from flying_lab.signals import ended_by_signals
from flying_serving.errors import ServerFailed
from flying_serving.placement.topology import Topology, read_topology

CHECKOUT = Path(flying_lab.__file__).resolve().parents[1]
INTERRUPTED = 130
COLUMNS = 80
CPU_SAMPLE_S = 1.0
FEW_CPUS = 0.25
"""The CPUs that other programs may use without a note."""


def main() -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flying_lab.demo", description=__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--layouts", action="store_true", help="only the first part: an operator changes the layout"
    )
    part.add_argument(
        "--burst", action="store_true", help="only the second part: the server decides"
    )
    part.add_argument(
        "--short",
        action="store_true",
        help="only the second part, auto alone, without the end of the load: it has to switch",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.5, help="seconds in each layout (default: %(default)s)"
    )
    parser.add_argument(
        "--models", type=Path, default=CHECKOUT / ".models", help="directory of the models"
    )
    options = parser.parse_args()
    if not 0.5 <= options.seconds <= 600:
        parser.error("--seconds must be between 0.5 and 600")
    console = Console(width=COLUMNS, highlight=False)
    os.environ |= CPU_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1"}
    try:
        with ended_by_signals():
            return _demo(console, options)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; the server is stopped[/yellow]")
        return INTERRUPTED
    except (ServerFailed, BenchError, OSError, httpx.HTTPError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1


def others_note(percents: Sequence[float], topology: Topology) -> str | None:
    """Return a note on other programs that were at work before the demo began; None if they used
    little.

    `percents`: how busy each CPU of the machine was. Only the CPUs that the demo may run on count.
    """
    numbers = topology.nodes
    used = sum(percent for number, percent in enumerate(percents) if number in numbers) / 100
    if used < FEW_CPUS:
        return None
    return (
        f"Note: other programs use {used:.1f} of {len(numbers)} CPUs that the demo may run on. "
        "They slow what is "
        "measured here, most of all engines together, as these wait for each other."
    )


def _demo(console: Console, options: argparse.Namespace) -> int:
    """Run the chosen parts. Returns the exit code."""
    begun = time.monotonic()
    if note := others_note(psutil.cpu_percent(CPU_SAMPLE_S, percpu=True), read_topology()):
        console.print(note)
    shown: list[Shown] = []
    if not (options.burst or options.short):
        console.rule("an operator changes the layout", align="left")
        shown.append(layouts.run(console, options.models, options.seconds))
    if not options.layouts:
        console.rule("the server changes the layout, on emulated devices", align="left")
        shown.append(burst.run(console, options.models, short=options.short))
    if warning := lag_warning([summary for one in shown for summary in one.summaries]):
        console.print(f"\nNote: {warning}. It shares the cores with the engines.")
    wrong = [line for one in shown for line in one.wrong]
    for line in wrong[:20]:
        console.print(f"wrong: {line}", style="red", markup=False)
    verdict = f"[red]{len(wrong)} things were wrong[/red]" if wrong else "[green]all right[/green]"
    console.print(f"{verdict}; {time.monotonic() - begun:.0f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
