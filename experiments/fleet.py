"""How fast the simulator is: `python -m experiments.fleet [REQUESTS [POLICY]]`, a million requests on 512 engines.

64 nodes of 8 H200s with Nemotron-8B behind a router, 60 requests/s per node on average in quiet and busy times. The
requests are made as they are needed and forgotten when they have ended. Not part of `make experiments`.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

from msgspec.structs import replace

from experiments.tally import Totals
from flying_serving.sim import hardware, models
from flying_serving.sim.baselines import build
from flying_serving.sim.cluster import Options
from flying_serving.sim.fleet import Fleet
from flying_serving.sim.machine import Modelled
from flying_serving.workload.model import Request
from flying_serving.workload.synth import Alternating, synthesise

NODES = 64
NODE_RATE_RPS = 60.0
_PIECE = 10_000


def stream(requests: int, rate_rps: float) -> Iterator[Request]:
    """Requests piece by piece, each piece drawn from its own seed."""
    begin_s, index = 0.0, 0
    while index < requests:
        count = min(_PIECE, requests - index)
        low, burst = 0.5 * rate_rps, 2 * rate_rps
        shape = Alternating(requests=count, low_s=60, burst_s=30, low_rate_rps=low, burst_rate_rps=burst)
        piece = synthesise(shape, index)
        for request in piece.requests:
            yield replace(request, index=index, arrival_s=begin_s + request.arrival_s)
            index += 1
        begin_s += piece.duration_s


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser("python -m experiments.fleet", description=__doc__)
    parser.add_argument("requests", nargs="?", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("policy", nargs="?", default="auto", help="default: %(default)s")
    options = parser.parse_args()
    run(options.requests, options.policy)


def run(requests: int, policy: str) -> None:
    """Simulate it and say what it took; the memory in use is printed as it goes on."""
    machine = Modelled(models.load("nemotron-8b"), hardware.parse_devices("h200x8"))
    totals = Totals()
    fleet = Fleet(build(policy, machine, 1, Options(keep_times=False)), NODES, on_end=totals.add)
    began_s, used_s, shown = time.perf_counter(), time.process_time(), 0

    def progress(over: int) -> None:
        nonlocal shown
        if over >= shown + requests // 10:
            shown = over
            mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{over} requests, {time.process_time() - used_s:.0f} s of processor time, {mib:.0f} MiB", flush=True)

    fleet.run(stream(requests, NODES * NODE_RATE_RPS), progress)
    print(
        f"{policy}: {fleet.over} requests ({totals.refused} refused) on {NODES * 8} engines, {fleet.clock.now_s:.0f} s "
        f"simulated in {time.process_time() - used_s:.0f} s of processor time, {time.perf_counter() - began_s:.0f} s"
    )
    print(
        f"mean TTFT {totals.ttft.mean_s:.3f} s, P99 {totals.ttft.quantile_s(0.99):.3f} s, mean TPOT "
        f"{totals.tpot.mean_s * 1e3:.2f} ms, {sum(n.controller.switches.count for n in fleet.nodes)} switches, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
