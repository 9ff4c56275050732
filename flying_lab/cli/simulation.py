"""`flying-serving simulate`: check everything, then serve one workload with several systems, and
compare them.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flying_lab.bench import replay, view
from flying_lab.bench.options import WorkloadOptions, make_out
from flying_lab.bench.plan import workload_of
from flying_lab.bench.report.load import MeasuredSystem
from flying_lab.bench.switchlog import SwitchLog
from flying_lab.cli.simulator_options import SimulatorOptions
from flying_lab.results.metrics import summarise
from flying_lab.sim import hardware, models
from flying_lab.sim.announced import Source, announcing
from flying_lab.sim.catalog import build, names
from flying_lab.sim.cluster import Options
from flying_lab.sim.fleet import Fleet
from flying_lab.sim.machine import Machine, Modelled, load_measured
from flying_lab.sim.node import System
from flying_lab.sim.routing import RouterName, make_router
from flying_lab.sim.run import Simulated, results
from flying_lab.sim.system import check_engine
from flying_lab.workload import files
from flying_lab.workload.model import Workload
from flying_serving.cli.connection import output
from flying_serving.errors import ConfigError
from flying_serving.slo import Slo

COLUMNS = (
    ("TTFT mean", "mean_ttft_ms"),
    ("p50", "median_ttft_ms"),
    ("p90", "p90_ttft_ms"),
    ("p99", "p99_ttft_ms"),
    ("TPOT p50", "median_tpot_ms"),
    ("p90", "p90_tpot_ms"),
    ("p99", "p99_tpot_ms"),
    ("E2E mean", "mean_e2el_ms"),
    ("p99", "p99_e2el_ms"),
    ("tokens/s", "output_throughput"),
    ("switches", "switches"),
)
PREFIXES = (("hits", "prefix_cache_hit_rate"),)
ASKED_TIMES = 4
"""`max_tokens` of clients whose lengths the server does not know, in longest outputs."""


def main(asked: SimulatorOptions, workload_options: WorkloadOptions) -> int:
    """Run the command. Returns its exit code.

    Raises:
        FlyingError: if anything in the options is not available; before anything runs.
    """
    machine = machine_of(asked.model, asked.hardware, asked.gpu_memory_utilization)
    devices = asked.devices_per_engine or machine.smallest_engine
    check_engine(machine, devices)
    options = Options(
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        horizon_s=asked.horizon_s,
        slo_s=(asked.slo or Slo()).targets_s,
        tbt_slo_s=math.inf if asked.tbt_slo_ms is None else asked.tbt_slo_ms / 1e3,
        lend_weights=asked.lend_weights,
        token_parallel=not asked.no_token_parallel,
    )
    systems = [build(name, machine, devices, options) for name in _split(asked.policy, machine)]
    workload = workload_of(workload_options)
    if asked.lengths is not None:
        systems = [_announcing(system, workload, asked.lengths) for system in systems]
    if asked.prefix_caching:
        systems = [_keeping_prefixes(system, workload) for system in systems]
    if asked.out is not None:
        make_out(asked.out)
    console = output(stderr=asked.as_json, width=150)
    where = (
        f"{asked.model or 'measured'} on "
        f"{'' if asked.nodes == 1 else f'{asked.nodes} x '}{asked.hardware}"
    )
    nodes = (asked.nodes, asked.router)
    runs = [run(system, workload, where, console, asked.slo, nodes) for system in systems]
    if asked.out is not None:
        save(runs, workload, asked.out)
    if asked.as_json:
        sys.stdout.write(json.dumps({one.system.name: one.summary for one in runs}) + "\n")
    else:
        title = f"{where}; times in ms, of completed requests"
        columns = (*COLUMNS, *PREFIXES) if asked.prefix_caching else COLUMNS
        console.print(view.systems(title, columns, {one.system.name: one.summary for one in runs}))
    return 0


def machine_of(model: str | None, devices: str, utilization: float) -> Machine:
    """Return the machine of the systems: a model on devices like `h200x8`, or the server of a file
    of `flying-serving fit`.

    Raises:
        ConfigError: naming the flag, its value and the names that exist.
    """
    path = Path(devices)
    if path.is_file():
        if model is not None:
            raise ConfigError(
                f"--model={model!r}: {devices} was measured with a model; leave --model out"
            )
        return load_measured(path)
    if model is None:
        raise ConfigError(
            f"--model is needed: one of {', '.join(models.names())}, or a config.json"
        )
    return Modelled(models.load(model), hardware.parse_devices(devices), utilization)


def _announcing(system: System, workload: Workload, source: Source) -> System:
    """Return the same system with clients that announce lengths as `source` says, and ask for more
    tokens than any of them gets.
    """
    longest_tokens = max(request.output_tokens for request in workload.requests)
    return announcing(system, source, workload.seed, ASKED_TIMES * longest_tokens)


def _keeping_prefixes(system: System, workload: Workload) -> System:
    """Return the same system with prefix caches. Raises ConfigError if the workload does not say
    which prompts begin alike.
    """
    if not any(request.hash_ids for request in workload.requests):
        raise ConfigError(
            "--prefix-caching: no request of this workload has hash ids, so no two prompts begin "
            "alike"
        )
    return replace(system, hash_id_tokens=workload.block_tokens)


def _split(text: str, machine: Machine) -> list[str]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or len(set(asked)) < len(asked):
        raise ConfigError(
            f"--policy={text!r}: names with commas between, each once: {', '.join(names(machine))}"
        )
    return asked


def run(
    system: System,
    workload: Workload,
    where: str,
    console: Console,
    slo: Slo | None = None,
    nodes: tuple[int, RouterName] = (1, "cache-aware"),
) -> Simulated:
    """Serve a workload with nodes behind a router, with a progress bar where there is a
    terminal.
    """
    count, router = nodes
    fleet = Fleet(system, count, make_router(router, workload.block_tokens))
    bar = Progress(
        TextColumn(f"{system.name:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    bar.disable = not console.is_terminal
    with bar:
        task = bar.add_task(system.name, total=len(workload.requests))
        fleet.run(workload.requests, lambda over: bar.update(task, completed=over))
        bar.update(task, completed=len(workload.requests))
    outcome = fleet.outcome()
    found = results(system, workload, outcome, where)
    summary = summarise(found, slo) | {"switches": len(outcome.switches)} | _of_nodes(fleet, router)
    return Simulated(system, outcome, found, summary)


def _of_nodes(fleet: Fleet, router: RouterName) -> dict[str, Any]:
    """Return the part of a summary about prefix caches and about several nodes."""
    queried_tokens, hit_tokens = fleet.prefix_tokens()
    said: dict[str, Any] = (
        {"prefix_cache_hit_rate": hit_tokens / queried_tokens} if queried_tokens else {}
    )
    if len(fleet.nodes) > 1:
        said |= {"router": router, "node_requests": fleet.routed}
    return said


def measured(one: Simulated) -> MeasuredSystem:
    """Return a simulated system as figures take it."""
    log = None if one.log is None else msgspec.convert(one.log, SwitchLog)
    return MeasuredSystem(one.system.name, one.results, one.summary, log)


def save(runs: Sequence[Simulated], workload: Workload, out: Path) -> None:
    """Write the same files as `bench --compare`: the workload, each system's results in its
    directory, figures and a page.
    """
    from flying_lab.bench.report import load, page  # matplotlib

    files.save(workload, out / "workload.jsonl")
    for one in runs:
        replay.save(out / one.system.name, one.results, one.summary, one.log)
    load.save_comparison(dict.fromkeys(one.system.name for one in runs), out)
    page.draw_all(out, None, "png")
