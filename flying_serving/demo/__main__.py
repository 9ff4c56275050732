"""`make demo`: four engines on the CPU that merge and split while requests stream. Ends by itself.

First, two engines share a request, and an operator changes the layout while requests stream. Then the server decides: a
burst between two quiet phases, with policy `auto` and, for comparison, with both fixed layouts.

Exit code 0: every request got all its tokens, every switch was made, and after the first part the block bookkeeping
is consistent.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console

import flying_serving
from flying_serving.cli.connection import output
from flying_serving.demo import layouts, traffic
from flying_serving.errors import BenchError, ServerFailed
from flying_serving.testing.servers import CPU_ENVIRONMENT
from flying_serving.testing.signals import ended_by_signals

CHECKOUT = Path(flying_serving.__file__).resolve().parents[1]
INTERRUPTED = 130


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flying_serving.demo", description=__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--layouts", action="store_true", help="only the first part: an operator changes the layout")
    part.add_argument("--auto", action="store_true", help="only the second part: the server decides")
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds in each layout (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=CHECKOUT / ".models", help="directory of the models")
    options = parser.parse_args()
    if not 0.5 <= options.seconds <= 600:
        parser.error("--seconds must be between 0.5 and 600")
    console = output(width=150)
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


def _demo(console: Console, options: argparse.Namespace) -> int:
    """Run the chosen parts; the exit code."""
    begun = time.monotonic()
    wrong: list[str] = []
    if not options.auto:
        console.rule("an operator changes the layout", align="left")
        wrong += layouts.run(console, options.models, options.seconds)
    if not options.layouts:
        console.rule("the server changes the layout", align="left")
        wrong += traffic.run(console, options.models)
    for line in wrong[:20]:
        console.print(f"wrong: {line}", style="red", markup=False)
    verdict = f"[red]{len(wrong)} things were wrong[/red]" if wrong else "[green]all right[/green]"
    console.print(f"{verdict}; {time.monotonic() - begun:.0f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
