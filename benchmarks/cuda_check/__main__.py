"""The check of one GPU within ten minutes. Writes its table into docs/cuda.md.

Without a GPU, or with --dry, it runs on the CPU, leaves the page as it is, and says of each line
that needs a GPU that it was not run.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch
from vllm.version import __version__ as vllm_version

from benchmarks.cuda_check.checks import lines
from benchmarks.cuda_check.lines import Limits, Outcome, Result, carry_out
from benchmarks.cuda_check.page import table, write
from benchmarks.cuda_check.site import Site
from flying_lab.signals import ended_by_signals
from harness.place import SETTING, Place

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BUDGET_S, START_S = 600.0, 150.0
DRY_PATIENCE = 4.0
"""On the CPU four engines share the cores of one machine."""


def about(*, has_gpu: bool) -> dict[str, str]:
    """Return what the table says of the machine and the versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "Device": torch.cuda.get_device_name() if has_gpu else "none, a dry run on the CPU",
        "Driver": _driver() if has_gpu else "none",
        "Software": f"torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"vLLM {vllm_version}",
        "Code": f"commit {commit.stdout.strip() or 'unknown'}",
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0]


def main() -> int:
    """Run the check. Returns 1 if a line has failed or was out of time."""
    parser = argparse.ArgumentParser(prog="make cuda-check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, also where a GPU is")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="of the whole check, on a GPU"
    )
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not options.dry
    os.environ[SETTING] = Place.ONE_GPU if has_gpu else Place.CPU
    outcomes = run(options.only, options.budget_s, has_gpu=has_gpu)
    text = table(about(has_gpu=has_gpu), outcomes)
    if has_gpu and not options.only:
        write(PAGE, text)
    else:
        print(text)
    counts = Counter(one.result for one in outcomes)
    print(", ".join(f"{counts[result]} {result}" for result in Result))
    return int(counts[Result.FAILED] + counts[Result.OUT_OF_TIME] > 0)


def run(only: str, budget_s: float, *, has_gpu: bool) -> list[Outcome]:
    """Run the lines whose name has `only` in it, and print each when it is done."""
    patience = 1.0 if has_gpu else DRY_PATIENCE
    limits = Limits(budget_s * patience, START_S, patience)
    chosen = [line for line in lines() if only in line.name]
    site, outcomes = Site(has_gpu=has_gpu), list[Outcome]()
    try:
        for one in carry_out(chosen, site, limits, has_gpu=has_gpu):
            print(f"{one.result:11} {one.name}: {one.figure} ({one.took_s:.0f} s)", flush=True)
            outcomes.append(one)
    finally:
        site.end()
    return outcomes


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
