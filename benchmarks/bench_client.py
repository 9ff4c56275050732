"""How many streams and tokens per second the client of `flying-serving bench` follows on one core.

python -m benchmarks.bench_client [--streams 2000] [--tokens-per-s 5000] [--hold-s 30]

The client is kept on one core; a mock server in a process of its own sends the tokens, on the
others. Requests come evenly until that number of streams run at a time, and are then replaced for a
while as they end. A second replay is more than any client can follow (every answer at once, as fast
as they come): the client has to say that it fell behind.
"""

import argparse
import os
import time

import numpy as np

from flying_lab.bench.client import Target
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import measure, probe
from flying_lab.results.metrics import summarise
from flying_lab.results.results import Results
from flying_lab.results.timeline import concurrency, tokens_per_s
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import parse_synthesis, synthesise
from harness import mock_server as mock

LIFE_S = 20.0


def even(rate_rps: float, duration_s: float, tokens: int) -> Workload:
    """Return requests that come evenly."""
    parameters = {"rate_rps": rate_rps, "duration_s": duration_s, "burstiness": 1e9}
    lengths = {"prompt_tokens": (256, 256), "output_tokens": (tokens, tokens)}
    return synthesise(parse_synthesis("gamma", parameters | lengths), 0)


def replay(workload: Workload, token_gap_s: float, cores: list[int]) -> tuple[Results, float]:
    """Replay on the first core, the mock server on the others.

    Returns the results and the share of its core that the client used.
    """
    os.sched_setaffinity(0, cores[1:] or cores)
    with mock.running(token_gap_s) as url:
        os.sched_setaffinity(0, cores[:1])
        target, settings = Target(url), BenchOptions()
        served = probe(target, settings)
        wall_s, processor_s = time.perf_counter(), time.process_time()
        results = measure(workload, target, served, settings)
        return results, (time.process_time() - processor_s) / (time.perf_counter() - wall_s)


def report(name: str, results: Results, processor: float, steady: slice) -> None:
    """Print one replay; streams and tokens are those of the steady time."""
    summary = summarise(results)
    times, counts = concurrency(results)
    inside = (times >= steady.start) & (times < steady.stop)
    print(f"{name}: {summary['completed']} of {summary['num_prompts']} requests completed")
    print(f"  streams at a time: median {np.median(counts[inside]):.0f}, most {counts.max()}")
    print(f"  tokens/s: mean {tokens_per_s(results)[steady].mean():.0f}")
    for lag in ("send", "loop"):
        print(
            f"  {lag} lag: p99 {summary[f'p99_{lag}_lag_ms']:.2f} ms, most "
            f"{summary[f'max_{lag}_lag_ms']:.1f} ms"
        )
    print(
        f"  of its core the client used {processor:.0%}; it says that it fell behind: "
        f"{summary['client_behind']}"
    )


def main() -> None:
    """Run both replays."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens-per-s", type=float, default=5000.0)
    parser.add_argument("--hold-s", type=float, default=30.0)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    gap_s = args.streams / args.tokens_per_s
    print(
        f"{len(cores)} cores, load average before: {os.getloadavg()[0]:.2f}, niceness {os.nice(0)}"
    )
    work = even(args.streams / LIFE_S, LIFE_S + args.hold_s, round(LIFE_S / gap_s) + 1)
    results, processor = replay(work, gap_s, cores)
    steady = slice(int(LIFE_S) + 1, int(LIFE_S + args.hold_s))
    report(f"{args.streams} streams, {args.tokens_per_s:.0f} tokens/s", results, processor, steady)
    flood, processor = replay(even(100.0, 5.0, 3000), 0.0, cores)
    report("more than a client can follow", flood, processor, slice(1, 5))
    print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
