"""The check of one GPU within ten minutes, from any interpreter with vLLM.

Without a GPU, or with --dry, it runs on the CPU, and says of each line that needs a GPU that it was
not run. The folder --out gets `table.md`, `lines.jsonl` and `logs.tar.gz`, each whole after every
line. A whole run on a GPU also writes its table into docs/design/cuda.md.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from benchmarks.cuda_check.checks import waves
from benchmarks.cuda_check.facts import facts, unusable_gpu
from benchmarks.cuda_check.lines import (
    Limits,
    Outcome,
    Result,
    carry_out,
    one_after_the_other,
)
from benchmarks.cuda_check.page import write
from benchmarks.cuda_check.report import Report
from benchmarks.cuda_check.site import Site
from flying_lab.signals import ended_by_signals
from harness.place import SETTING, Place

PAGE = Path(__file__).parents[2] / "docs" / "design" / "cuda.md"
BUDGET_S, START_S = 600.0, 170.0
DRY_PATIENCE = 4.0
"""On the CPU four engines share the cores of one machine."""


def main() -> int:
    """Run the check. Returns 1 if a line has failed or was out of time, and 2 if the GPU of the
    machine cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for what it finds")
    parser.add_argument("--dry", action="store_true", help="on the CPU, also where a GPU is")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="of the whole check, on a GPU"
    )
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not options.dry
    if not options.dry and (why := unusable_gpu(has_gpu=has_gpu)):
        print(why, file=sys.stderr)
        return 2
    os.environ[SETTING] = Place.ONE_GPU if has_gpu else Place.CPU
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch, "logs")
        logs.mkdir()
        report = Report(options.out, facts(has_gpu=has_gpu), logs)
        outcomes = run(options.only, options.budget_s, report, logs, has_gpu=has_gpu)
    if has_gpu and not options.only:
        write(PAGE, report.text())
    print(report.text())
    counts = Counter(one.result for one in outcomes)
    print(", ".join(f"{counts[result]} {result}" for result in Result))
    return int(counts[Result.FAILED] + counts[Result.OUT_OF_TIME] > 0)


def run(only: str, budget_s: float, report: Report, logs: Path, *, has_gpu: bool) -> list[Outcome]:
    """Run the lines whose name has `only` in it, and print each when it is done."""
    patience = 1.0 if has_gpu else DRY_PATIENCE
    chosen = [[line for line in wave if only in line.name] for wave in waves()]
    here = chosen if has_gpu else one_after_the_other(chosen)
    site = Site(logs, START_S * patience, has_gpu=has_gpu)
    limits, outcomes = Limits(budget_s * patience, patience), list[Outcome]()
    try:
        for one in carry_out(here, site, limits, has_gpu=has_gpu):
            print(f"{one.result:11} {one.name}: {one.figure} ({one.took_s:.0f} s)", flush=True)
            report.add(one)
            outcomes.append(one)
    finally:
        site.end()
        report.end()
    return outcomes


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
