"""The runs of figures 8 and 9 and of table 1: which systems, and what each is asked to serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from statistics import mean

from experiments import servers
from experiments.common import MAX_NUM_SEQS, PAPER, Setting, paper_workload, run
from flying_lab.cli.simulation import Simulated
from flying_lab.sim.baselines.release import Thresholds
from flying_lab.sim.catalog import operated
from flying_lab.sim.cluster import Options
from flying_lab.sim.node import System
from flying_lab.sim.run import simulate
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.policy.policies import POLICIES

LIMITS = (MAX_NUM_SEQS, 1024)
"""Values of `max_num_seqs`: the inferred one, which counts, and vLLM's default."""
PRODUCT = f"auto, {servers.PRODUCT}"
FORK = "fork, two thresholds"

THRESHOLDS: Mapping[str, Thresholds] = {
    "llama-3-70b": Thresholds(64, 128),
    "gpt-oss-120b": Thresholds(0, 0),
    "nemotron-8b": Thresholds(0, 0),
}
"""Of the fork's operator: the best of those that `python -m experiments.fork_thresholds` tries, on
a load that is not in overload, with a seed that no page reports. (0, 0) never joins: on that load
joining does not pay for the release's switches.
"""


def systems(model: str, setting: Setting, limit: int = MAX_NUM_SEQS) -> Iterator[System]:
    """Yield every system of the pages: `auto` with graphs, stock vLLM, then the eager ones.

    `limit`: their `max_num_seqs`.
    """
    options, auto = Options(max_num_seqs=limit), POLICIES["auto"]
    yield servers.ours(servers.GRAPHS, auto, model, setting, options)
    yield stock_dp(model, setting, options)
    middle = servers.degrees(model, setting)[1:-1]
    for name in (*(f"stock-tp{degree}" for degree in middle), "stock-tp", "shift-parallel"):
        yield servers.stock(name, model, setting, options)
    product = servers.ours(servers.PRODUCT, auto, model, setting, options)
    yield replace(product, name=PRODUCT)
    fork = servers.stock("fork", model, setting, options)
    yield fork
    yield replace(operated(fork, THRESHOLDS[model]), name=FORK)


def limits(setting: Setting) -> tuple[int, ...]:
    """Return the values of `max_num_seqs` that a run has: with another memory efficiency the
    inferred one alone, as no column shows the other.
    """
    return LIMITS if setting.memory_efficiency is None else LIMITS[:1]


def stock_dp(model: str, setting: Setting, options: Options) -> System:
    """Return stock vLLM's data parallel engines."""
    return servers.stock("stock-dp", model, setting, options)


def key(limit: int) -> str:
    """Under which the numbers of a `max_num_seqs` are kept."""
    return f"max_num_seqs {limit}"


@cache
def calibrated(model: str, setting: Setting) -> tuple[float, Workload]:
    """Return the paper's workload with bursts in which stock DP's mean TTFT is what the paper
    reports for it, and the factor of their rates.

    The paper gives one range of rates for all models, which our smaller models would not notice.
    One number, stock DP's, fixes the load; all others are compared.
    """
    published_s = PAPER[model]["burst_dp_ttft_s"]
    stock = stock_dp(model, setting, Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False))
    low, high = 0.5, 16.0
    for _ in range(8):
        middle = (low * high) ** 0.5
        workload = paper_workload(model, middle, setting.seed)
        in_burst = {str(request.index) for request in workload.requests if request.phase == "burst"}
        ended = simulate(stock, workload.requests).ended
        found = mean(r.first_token_s - r.arrival_s for r in ended if r.request_id in in_burst)
        low, high = (low, middle) if found > published_s else (middle, high)
    faster = round((low * high) ** 0.5, 2)
    return faster, paper_workload(model, faster, setting.seed)


def low_run(one: System, model: str, seed: int) -> Simulated:
    """Serve the paper's low phases alone, 2 to 5 requests per second, without a backlog from a
    burst.
    """
    return run(one, model, synthesise(Poisson(requests=600, rate_rps=3.5), seed))


def peak_tokens_per_s(one: System, model: str, seed: int) -> float:
    """Return the output tokens per second of a system that always has work: 2,000 of the paper's
    requests at once, the middle.
    """
    done = run(one, model, synthesise(Poisson(requests=2000, rate_rps=2000.0), seed))
    ends = sorted(r.end_s for r in done.outcome.ended)
    begin_s, end_s = ends[len(ends) // 5], ends[3 * len(ends) // 5]
    times = done.results.event_s
    return float(((begin_s <= times) & (times < end_s)).sum() / (end_s - begin_s))
