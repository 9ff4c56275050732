"""The check of one GPU within ten minutes. Writes its table into docs/cuda.md.

Without a GPU, or with --dry, it runs on the CPU, leaves the page as it is, and says of each line
that needs a GPU that it was not run.
"""

import argparse
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch
from vllm.version import __version__ as vllm_version

from benchmarks.cuda_check.checks import lines
from benchmarks.cuda_check.lines import Outcome, Result, carry_out
from benchmarks.cuda_check.page import table, write
from benchmarks.cuda_check.site import Site

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BUDGET_S = 600.0


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
    """Run the check. Returns 1 if a line has failed."""
    parser = argparse.ArgumentParser(prog="make cuda-check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on the CPU, also where a GPU is")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the whole check")
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not options.dry
    chosen = [line for line in lines() if options.only in line.name]
    site, outcomes = Site(has_gpu=has_gpu), list[Outcome]()
    try:
        for one in carry_out(
            chosen, site, has_gpu=has_gpu, budget_s=options.budget_s, given_up=site.end
        ):
            print(f"{one.result:8} {one.name}: {one.figure} ({one.took_s:.0f} s)", flush=True)
            outcomes.append(one)
    finally:
        site.end()
    text = table(about(has_gpu=has_gpu), outcomes)
    if has_gpu and not options.only:
        write(PAGE, text)
    else:
        print(text)
    counts = Counter(one.result for one in outcomes)
    print(", ".join(f"{counts[result]} {result}" for result in Result))
    return int(counts[Result.FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
