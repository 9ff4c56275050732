"""Run benchmarks in turn, each in a process of its own.

python -m benchmarks                     all of them
python -m benchmarks --list              say what each measures
python -m benchmarks NAME ...            those
python -m benchmarks NAME OPTION ...     that one with options, --help among them
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from flying_lab.server_process import STOP_S
from flying_lab.signals import ended_by_signals

HERE = Path(__file__).parent
END_S = 4 * STOP_S
"""A benchmark ends its servers one after the other."""
NAMES = (
    "steady_state",
    "model_costs",
    "host_time",
    "startup",
    "moe_start",
    "switch_cost",
    "switch_storm",
    "collectives",
    "coordination",
    "group_host",
    "bench_client",
    "agreement",
    "observability",
    "decisions",
    "link",
    "policies",
    "validity",
    "context",
    "crossover",
    "handoff",
    "time_between_tokens",
    "split",
    "fixed_layouts",
    "quiet_and_bursts",
    "long_prompts",
    "urgent_requests",
)


def title(name: str) -> str:
    """The first paragraph of a benchmark's own description, in one line."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    description = ast.get_docstring(ast.parse(source)) or ""
    return " ".join(description.split("\n\n")[0].split())


def run_to_its_end(line: Sequence[str]) -> int:
    """Run a command and return its exit code. If a signal ends this process, tell the command to
    end, and wait until it has ended its servers.
    """
    process = subprocess.Popen(line)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        raise
    finally:
        process.kill()


def main() -> None:
    """Exit code 1 if any benchmark failed, 2 if the command line is wrong."""
    words = sys.argv[1:]
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = words[len(names) :]
    usage = f"{__doc__}\n" + "\n".join(f"{name:20}{title(name)}" for name in NAMES)
    if words in (["--list"], ["--help"], ["-h"]):
        print(usage)
        return
    if set(names) - set(NAMES) or (options and len(names) != 1):
        print(f"{' '.join(words)}: not understood\n\n{usage}", file=sys.stderr)
        sys.exit(2)
    failed = []
    for name in names or NAMES:
        print(f"\n{name}: {title(name)}\n", flush=True)
        if run_to_its_end([sys.executable, "-m", f"benchmarks.{name}", *options]):
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    with ended_by_signals():
        main()
