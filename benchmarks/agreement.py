"""Whether `flying-serving bench` measures what `vllm bench serve` measures: both in turn against a
stock vLLM server.

python -m benchmarks.agreement [--rounds 3] [--requests 60] [--rate 1.0]

Both replay the same file, a timed trace. A first round of each does not count; then they take
turns, and which goes first changes from round to round. Exit code 1 if the medians of mean TTFT,
mean TPOT or output tokens/s differ by more than 3%, or any request was not completed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.systems import ROOT, System
from flying_lab.server_process import CPU_ENVIRONMENT
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.files import save_timed_trace
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise

FLAGS = [
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=536870912",
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
]
MOST = 0.03
COMPARED = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput")
SHOWN = (
    *COMPARED,
    "median_ttft_ms",
    "median_tpot_ms",
    "mean_itl_ms",
    "mean_e2el_ms",
    "request_throughput",
    "duration",
)
VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs; vLLM's package for CPUs has no working `vllm` command."""
OURS, THEIRS = "flying-serving bench", "vllm bench serve"
Summary = dict[str, Any]


def ours(system: System, trace: Path, workload: Workload, out: Path) -> Summary:
    """Replay with `flying-serving bench`."""
    command = [
        sys.executable,
        "-m",
        "flying_serving.cli.main",
        "bench",
        "--url",
        system.url,
        "--trace",
        str(trace),
    ]
    command += ["--trace-format", "timed_trace", "--hash-block-tokens", str(workload.block_tokens)]
    return summary_of(
        [*command, "--token-ids", "300:8000", "--out", str(out)], out / "summary.json"
    )


def theirs(system: System, trace: Path, workload: Workload, out: Path) -> Summary:
    """Replay with `vllm bench serve`."""
    command = [sys.executable, "-c", VLLM, "--backend=vllm", f"--base-url={system.url}"]
    command += [
        f"--model={system.model}",
        "--dataset-name=timed_trace",
        f"--dataset-path={trace}",
        "--disable-tqdm",
    ]
    command += [
        f"--timed-trace-chunk-hash-size={workload.block_tokens}",
        f"--num-prompts={len(workload.requests)}",
    ]
    command += ["--percentile-metrics=ttft,tpot,itl,e2el", "--save-result", f"--result-dir={out}"]
    return summary_of([*command, "--result-filename=result.json"], out / "result.json")


def summary_of(command: list[str], path: Path) -> Summary:
    """Run a command; the JSON that it has written."""
    environment = os.environ | CPU_ENVIRONMENT | {"VLLM_PLUGINS": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not path.exists():
        sys.exit(
            f"{' '.join(command)}\nended with code "
            f"{done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        )
    if "fell behind" in done.stderr:
        print(done.stderr.strip(), flush=True)
    found: Summary = json.loads(path.read_text())
    return found


def report(found: dict[str, list[Summary]]) -> bool:
    """Print medians and their differences; whether those of COMPARED are small enough."""
    agree = True
    print(f"\nmedians [smallest..largest] of {len(found[OURS])} rounds\n")
    print(f"{'':20}{OURS:>34}{THEIRS:>34}{'difference':>12}")
    for key in SHOWN:
        values = {
            name: [float(summary[key]) for summary in rounds] for name, rounds in found.items()
        }
        difference = median(values[OURS]) / median(values[THEIRS]) - 1
        cells = [
            f"{median(each):.3f} [{min(each):.3f}..{max(each):.3f}]" for each in values.values()
        ]
        verdict = ""
        if key in COMPARED:
            verdict = "" if abs(difference) <= MOST else f"  more than {MOST:.0%}"
            agree = agree and abs(difference) <= MOST
        print(f"{key:20}{cells[0]:>34}{cells[1]:>34}{difference:>+12.2%}{verdict}")
    return agree


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    args = parser.parse_args()
    lengths: dict[str, Any] = {"prompt_tokens": (128, 512), "output_tokens": (16, 64)}
    workload = synthesise(Poisson(requests=args.requests, rate_rps=args.rate, **lengths), 1)
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    found: dict[str, list[Summary]] = {OURS: [], THEIRS: []}
    complete = True
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.jsonl"
        save_timed_trace(workload, trace)
        system = System("stock", model, FLAGS, ours=False)
        try:
            print(
                f"stock vLLM ready in {system.ready_s:.1f} s; load average "
                f"{os.getloadavg()[0]:.2f}",
                flush=True,
            )
            for number in range(args.rounds + 1):
                for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                    out = Path(scratch) / f"{name.split()[0]}-{number}"
                    out.mkdir()
                    summary = (ours if name == OURS else theirs)(system, trace, workload, out)
                    tokens = (
                        summary["completed"],
                        summary["total_input_tokens"],
                        summary["total_output_tokens"],
                    )
                    complete = complete and tokens == (len(workload.requests), *totals(workload))
                    shown = ", ".join(f"{key} {summary[key]:.2f}" for key in COMPARED)
                    print(f"round {number}, {name:20} completed {tokens[0]}: {shown}", flush=True)
                    if number:
                        found[name].append(summary)
        finally:
            system.stop()
    agree = report(found)
    if not complete:
        print("not every request was completed with its tokens")
    print(f"load average {os.getloadavg()[0]:.2f}")
    sys.exit(0 if agree and complete else 1)


def totals(workload: Workload) -> tuple[int, int]:
    """Prompt and output tokens."""
    return workload.prompt_tokens, workload.output_tokens


if __name__ == "__main__":
    with ended_by_signals():
        main()
