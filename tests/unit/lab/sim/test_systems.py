"""Systems by name: what they run on, what baselines do differently, and what is refused before
anything runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flying_lab.results.metrics import summarise
from flying_lab.sim.baselines.release import Thresholds
from flying_lab.sim.baselines.shift_parallel import shifting
from flying_lab.sim.catalog import build, names, operated
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.host import OURS_ALONE, OURS_GROUP, STOCK_TENSOR
from flying_lab.sim.machine import COLLECTIVE_S, MESSAGE_S, load_measured
from flying_lab.sim.node import SimNode
from flying_lab.sim.requests import Chunk, SimStep
from flying_lab.sim.run import results, simulate
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.shape import with_priority
from flying_lab.workload.synth import Alternating, Poisson, synthesise
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.policy.snapshot import Decision, Need, Snapshot
from flying_serving.predict.migrations import MigrationCost
from tests.unit.lab.sim.machines import h200, machine_file
from tests.unit.policy.snapshots import BUSY, OBJECTIVE, decide, load, snapshot

WORKLOAD = synthesise(
    Alternating(
        requests=120,
        low_rate_rps=4,
        burst_rate_rps=40,
        low_s=6,
        burst_s=2,
        prompt_tokens=(100, 3000),
    ),
    3,
)


@pytest.mark.parametrize("name", names(h200()))
def test_every_system_serves_all_requests(name: str) -> None:
    """All requests end, with the lengths that they asked for, in a table like that of a live
    server.
    """
    system = build(name, h200(), 1, Options())
    outcome = simulate(system, WORKLOAD.requests)
    summary = summarise(results(system, WORKLOAD, outcome, "llama-3-8b on h200x4"))
    assert summary["completed"] == summary["num_prompts"] == 120
    assert 0.0 <= summary["mean_queue_time_ms"] < summary["mean_ttft_ms"]
    assert summary["total_output_tokens"] == WORKLOAD.output_tokens
    assert 0 < summary["mean_ttft_ms"] < summary["mean_e2el_ms"]
    assert set(summary["phases"]) == {"low", "burst"}


def test_auto_and_a_fixed_layout_give_the_same_figures_in_the_same_layout() -> None:
    """As `auto` does in a dry run, while no request has to wait in the pool. It learns the times of
    steps meanwhile, so that some requests get another engine.
    """
    load = with_priority(synthesise(Poisson(requests=150, rate_rps=20), 1), 0.1, -1, seed=1)
    ours = flying(h200(), 1, POLICIES["auto"], Options())
    stays = replace(ours, settings=replace(ours.settings, dry_run=True))
    static = flying(h200(), 1, POLICIES["static-dp"], Options())
    summaries = [
        summarise(results(one, load, simulate(one, load.requests), "")) for one in (stays, static)
    ]
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"):
        auto, fixed = (summary[figure] for summary in summaries)
        assert auto == pytest.approx(fixed, rel=0.01), figure


@pytest.mark.parametrize("name", ["auto", "stock-dp", "fork"])
def test_the_same_workload_gives_the_same_table(name: str) -> None:
    """Simulations are repeatable, and kept times of tokens change nothing but the gaps between
    tokens.
    """
    tables = []
    for keep_times in (True, True, False):
        system = build(name, h200(), 1, Options(keep_times=keep_times))
        tables.append(results(system, WORKLOAD, simulate(system, WORKLOAD.requests), "").table)
    assert tables[0].equals(tables[1])
    for column in ("first_byte_s", "end_s", "output_tokens", "status"):
        assert tables[0].column(column).equals(tables[2].column(column))


def test_a_stock_degree_holds_its_weights_once() -> None:
    """So it has more KV than a group of engines that each hold all of an engine's weights."""
    machine = h200("llama-3-70b", "h200x8")
    wide, group = build("stock-tp", machine, 2, Options()), build("auto", machine, 2, Options())
    assert wide.shape.engines == 1
    assert group.shape.engines == 4
    assert wide.settings.capacity.kv_tokens[1] > 1.5 * group.settings.capacity.kv_tokens[4]
    assert build("stock-tp4", machine, 2, Options()).shape.engines == 2


def test_wide_is_faster_alone_and_narrow_is_faster_together() -> None:
    quiet = Workload("quiet", 0, (Request(0, 0.0, 2000, 100),))
    busy = synthesise(Poisson(requests=300, rate_rps=200.0, output_tokens=(20, 40)), 0)
    e2e = {}
    for name in ("stock-dp", "stock-tp"):
        for workload in (quiet, busy):
            system = build(name, h200(), 1, Options())
            summary = summarise(results(system, workload, simulate(system, workload.requests), ""))
            e2e[name, workload.name] = summary["mean_e2el_ms"]
    assert e2e["stock-tp", "quiet"] < 0.7 * e2e["stock-dp", "quiet"]
    assert e2e["stock-dp", "poisson"] < 0.9 * e2e["stock-tp", "poisson"]


def test_shift_parallelism_shifts() -> None:
    """Tensor parallel for a few decodes, faster than it for a long prompt."""
    machine = h200("llama-3-70b", "h200x8")
    time, tensor = shifting(machine, 2, 8), machine.step_time(8)
    decode, prompt = SimStep([], 4, 4000), SimStep([Chunk(8000, 0)])
    assert time(decode) == tensor(decode)
    assert time(prompt) < 0.9 * tensor(prompt)


def test_the_fork_waits_and_ours_does_not() -> None:
    """With outputs that are short enough for waiting to be worth its cost."""
    lengths: dict[str, Any] = {"prompt_tokens": (100, 6000), "output_tokens": (10, 60)}
    rates = {"low_rate_rps": 4.0, "burst_rate_rps": 40.0, "low_s": 6.0, "burst_s": 2.0}
    bursts = synthesise(Alternating(requests=120, **rates, **lengths), 3)
    modes = {}
    for name in ("auto", "fork"):
        system = build(name, h200(), 1, Options())
        modes[name] = {switch.mode for switch in simulate(system, bursts.requests).switches}
    assert modes == {"auto": {"weave", "migrate"}, "fork": {"sequential"}}


def decided(shot: Snapshot) -> tuple[Decision | None, Decision | None]:
    """What `auto` and the fork decide on two engines."""
    fork = build("fork", h200("llama-3-70b"), 2, Options()).settings.policy
    return decide("auto", shot), decide(fork, shot)


def test_fork_weighs_the_cost_of_its_own_switch() -> None:
    """It switches where waiting is worth it, not where only migrating would be, and not while it is
    idle.
    """
    wide, costs = Layout.uniform(4, 4), {4: MigrationCost(0.002, 1e-6)}
    ours, fork = decided(
        snapshot(wide, BUSY, {wide.groups[0]: load(4, left=3.0)}, migrations=costs)
    )
    assert ours is not None and fork is not None
    assert fork.mode == "sequential"
    assert fork.cost == ours.considered["sequential"]
    assert fork.cost > ours.cost
    ours, fork = decided(
        snapshot(wide, BUSY, {wide.groups[0]: load(4, left=2000.0)}, migrations=costs)
    )
    assert ours is not None and ours.considered["sequential"] > ours.gain > ours.cost
    assert fork is None
    ours, fork = decided(snapshot(wide, BUSY))
    assert ours is not None and fork is None


def test_the_fork_stops_running_requests_for_an_urgent_one() -> None:
    need = Need(2, urgent=True, reason="priority: 1 urgent requests")
    _, fork = decided(
        snapshot(Layout.uniform(4, 1), BUSY, {(n,): load(4) for n in range(4)}, [need])
    )
    assert fork is not None and (fork.mode, fork.cost) == ("hard", fork.considered["hard"])


@pytest.mark.parametrize(
    ("size", "requests", "target"),
    [(1, 4, 4), (1, 5, None), (4, 32, None), (4, 33, 1), (4, 4, None), (1, 0, None)],
)
def test_an_operated_fork_switches_beyond_its_thresholds(
    size: int, requests: int, target: int | None
) -> None:
    """It joins at 4 requests, parts above 32, and does neither while it is idle."""
    fork = build("fork", h200("llama-3-70b"), 2, Options())
    policy = operated(fork, Thresholds(4, 32)).settings.policy
    layout = Layout.uniform(4, size)
    loads = {layout.groups[0]: load(requests)} if requests else {}
    decision = policy.decide(snapshot(layout, replace(BUSY, waiting=0.0), loads), OBJECTIVE)
    assert (decision and decision.layout.widest) == target
    assert decision is None or (decision.is_made and decision.mode == "sequential")


def test_no_step_is_shorter_than_the_hosts_work() -> None:
    """Nor longer than the devices' work where that is more. Stock vLLM has its own host."""
    machine = h200("llama-3-70b", "h200x8")
    long, short = SimStep([Chunk(4096, 0)], 7, 7000), SimStep([], 400, 400)
    slow = replace(machine, host_share=100.0)
    ours, stock = build("auto", slow, 2, Options()), build("stock-tp", slow, 2, Options())
    assert ours.step_time(1, short) == pytest.approx(100 * OURS_ALONE.busy.seconds(400))
    assert ours.step_time(4, short) == pytest.approx(100 * OURS_GROUP.busy.seconds(400))
    assert stock.step_time(1, short) == pytest.approx(100 * STOCK_TENSOR.busy.seconds(400))
    ours, stock = build("auto", machine, 2, Options()), build("stock-tp", machine, 2, Options())
    assert ours.step_time(4, long) == stock.step_time(1, long)
    assert ours.step_time(1, long) == machine.step_time(2)(long)


def test_simulated_steps_take_the_measured_time(tmp_path: Path) -> None:
    machine = load_measured(machine_file(tmp_path / "machine.json"))
    plan = SimStep([], 4, 400)
    assert build("auto", machine, 1, Options()).step_time(2, plan) == machine.step_time(2)(plan)


def test_a_measured_machine(tmp_path: Path) -> None:
    machine = load_measured(machine_file(tmp_path / "machine.json"))
    assert names(machine) == [
        *(name for name, policy in POLICIES.items() if policy.decides),
        "stock-dp", "stock-tp", "stock-tp2", "round-robin",
    ]  # fmt: skip
    (wide,) = simulate(build("stock-tp", machine, 1, Options()), [Request(0, 0.0, 100, 2)]).ended
    assert wide.first_token_s == pytest.approx(0.0005 + 0.01 + 0.01)
    with pytest.raises(ConfigError, match="fork"):
        build("fork", machine, 1, Options())


def test_where_kv_can_migrate(tmp_path: Path) -> None:
    """Between groups of ours, if it was measured or on modelled devices; not in the fork, nor in
    stock vLLM.
    """
    machine = h200("llama-3-70b", "h200x8")
    costs = build("auto", machine, 2, Options()).shape.migrations
    assert sorted(costs) == [2, 4]
    assert all(COLLECTIVE_S < cost.fixed_s < COLLECTIVE_S + 0.0005 for cost in costs.values())
    assert all(0.5e-6 < cost.token_s < 1.5e-6 for cost in costs.values())
    assert build("fork", machine, 2, Options()).shape.migrations == {}
    assert build("stock-tp", machine, 2, Options()).shape.migrations == {}
    assert machine.migration(1) is None
    unknown = load_measured(machine_file(tmp_path / "unknown.json"))
    assert build("auto", unknown, 1, Options()).shape.migrations == {}
    known = load_measured(machine_file(tmp_path / "known.json", {2: MigrationCost(0.001, 1e-5)}))
    system = build("auto", known, 1, Options())
    migrates = SimNode(system, Clock()).controller.state.migrates
    assert system.shape.migrations == migrates == {2: MigrationCost(0.001, 1e-5)}


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_modelled_migration_is_a_header_and_a_part_of_each_rank(degree: int) -> None:
    """To every device with all heads: 32 layers with keys and values of 8 heads of 128, in
    bfloat16. In a handoff each device pulls its own heads, by one message.
    """
    machine = h200()
    lines, link = machine.kind.hardware.all_reduce, machine.kind.hardware.spec.link_bandwidth.value
    large, pair = lines[degree].large, lines[2].large
    messages = ["header", *range(degree)]
    found, handoff = machine.migration(degree), machine.handoff(degree)
    assert found is not None and handoff is not None
    assert found.fixed_s == pytest.approx(COLLECTIVE_S + len(messages) * large.latency_s.value)
    assert found.token_s == pytest.approx(131_072 / (link * large.efficiency.value))
    assert handoff.fixed_s == pytest.approx(MESSAGE_S + pair.latency_s.value)
    assert handoff.token_s == pytest.approx(131_072 / degree / (link * pair.efficiency.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file: Invalid JSON"),
        ('{"engines": 0}', "engines: Input should be greater than or equal to 1"),
        ('{"format": "other"}', "format: Input should be 'flying-serving-machine'"),
    ],
)
def test_a_wrong_machine_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_measured(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_engines_join_where_there_are_two() -> None:
    assert "gyges-paper" in names(h200("llama-3-70b", "h200x4"))
    assert "gyges-paper" not in names(h200("llama-3-70b", "h200x2"))


def test_wrong_names_say_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"--policy='best': not one of auto, .*stock-tp4, .*fork"):
        build("best", h200(), 1, Options())
    with pytest.raises(ConfigError, match="--devices-per-engine=3: must be one of 1, 2, 4"):
        build("auto", h200(), 3, Options())
    with pytest.raises(ConfigError, match="--devices-per-engine=1: must be one of 2, 4, 8"):
        build("auto", h200("llama-3-70b", "h200x8"), 1, Options())
    with pytest.raises(ConfigError, match="power of two"):
        h200(devices="h200x3")
    with pytest.raises(ConfigError, match="weights and activations need"):
        _ = h200("llama-3-70b", "h200x1").smallest_engine
