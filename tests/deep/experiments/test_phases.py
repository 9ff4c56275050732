"""The load with phases, its servers, and ratios to the best fixed layout."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import pytest

from experiments import (
    fork_thresholds,
    live,
    phases,
    phases_load,
    phases_runs,
    phases_whole,
    run_history,
    servers,
)
from experiments.common import FIRST, MODELS, ROOT, Kept, Numbers, kept
from experiments.phases_load import (
    AFTER_S,
    BURST_S,
    BURSTS,
    CAPACITY_RPS,
    LOW_S,
    PHASES,
    Span,
    spans,
)
from experiments.phases_runs import FIGURES, systems
from experiments.rows import number
from experiments.servers import GRAPHS, PRODUCT, STOCK
from flying_lab.sim.outcome import LayoutChange
from flying_lab.sim.requests import SimStep
from flying_serving.layout.groups import Layout

MODEL = "llama-3-70b"


def test_a_load_begins_and_ends_low_and_has_the_seconds_after_each_burst() -> None:
    cycle_s = LOW_S + BURST_S
    assert list(spans(1)) == [
        Span("low", 0.0, LOW_S),
        Span("burst", LOW_S, cycle_s),
        Span("after", cycle_s, cycle_s + AFTER_S),
        Span("low", cycle_s + AFTER_S, cycle_s + LOW_S),
    ]


def test_requests_have_the_phase_and_the_rate_of_their_arrival() -> None:
    workload = phases_load.phased(1.0, 10.0, 1, seed=1)
    every = list(spans(1))
    for request in workload.requests:
        there = [one.phase for one in every if one.start_s <= request.arrival_s < one.end_s]
        assert there == [request.phase]
    count = sum(request.phase == "burst" for request in workload.requests)
    assert count == pytest.approx(10.0 * BURST_S, rel=0.15)
    assert {request.phase for request in workload.requests} == set(PHASES)


def test_a_capacity_is_found_again() -> None:
    assert phases_load.capacity_rps(MODEL) == pytest.approx(CAPACITY_RPS[MODEL], rel=0.01)


def test_the_plan_has_the_rates_that_are_run() -> None:
    plan = (Path(phases.__file__).parent / "plans" / "phases.md").read_text(encoding="utf-8")
    for model in MODELS:
        low_rps, burst_rps = phases_load.rates_rps(model)
        row = f"| {model} | {CAPACITY_RPS[model]:g} | {low_rps:.3g} | {burst_rps:.3g} |"
        assert f"{row} {BURSTS[model]} |" in plan


@pytest.mark.parametrize("model", MODELS)
def test_each_server_has_every_degree_as_a_fixed_layout(model: str) -> None:
    degrees = {"llama-3-70b": ("dp", "tp4", "tp8")}.get(model, ("dp", "tp2", "tp4", "tp8"))
    for server, kind in ((PRODUCT, "static"), (GRAPHS, "static"), (STOCK, "stock")):
        names = [one.name for one in systems(server, model, FIRST) if servers.is_fixed(one.name)]
        assert names == [f"{kind}-{degree}" for degree in degrees]


def test_only_the_product_is_eager_and_has_nccl_alone() -> None:
    """One decoding request in the widest group: eager steps are longer, and without the kernel for
    small messages longer still.
    """
    step = SimStep([], 1, 1000)
    product, graphs = (
        next(iter(systems(server, "nemotron-8b", FIRST))).step_time for server in (PRODUCT, GRAPHS)
    )
    assert product(1, step) > graphs(1, step)
    assert product(8, step) - graphs(8, step) > product(1, step) - graphs(1, step)


def test_no_server_is_told_the_lengths_of_outputs() -> None:
    for server in (PRODUCT, GRAPHS, STOCK):
        for one in systems(server, MODEL, FIRST):
            assert one.max_tokens is not None
            assert one.max_tokens(10) == one.max_tokens(500) == servers.MAX_TOKENS


def test_layouts_share_the_time_of_each_phase() -> None:
    changes = [
        LayoutChange(-10.0, Layout.uniform(4, 4)),
        LayoutChange(LOW_S + BURST_S / 4, Layout.uniform(4, 1)),
        LayoutChange(
            LOW_S + BURST_S + AFTER_S,
            Layout(((0,), (1,), (2, 3))),
        ),
    ]
    shares = phases_runs.layout_shares(changes, list(spans(1)), devices=2)
    assert shares["burst"] == {"1 x TP8": 0.25, "4 x TP2": 0.75}
    assert shares["after"] == {"4 x TP2": 1.0}
    assert shares["low"]["2 x TP2 + 1 x TP4"] == pytest.approx(160 / 340, rel=1e-3)


def test_layouts_are_named_by_their_degrees() -> None:
    assert phases_runs.layout_name(Layout.uniform(8, 2), devices=1) == "4 x TP2"


def test_a_run_has_every_figure_of_every_phase_and_its_switches() -> None:
    """A load so low that it takes a second."""
    workload, every = phases_load.phased(0.2, 4.0, 1, seed=1), list(spans(1))
    auto = next(iter(systems(GRAPHS, MODEL, FIRST)))
    found = phases_runs.measure_system(auto, MODEL, workload, every)
    assert found["refused"] == 0
    for phase in PHASES:
        assert all(found["phases"][phase][figure] >= 0 for figure in FIGURES)
        assert sum(found["layouts"][phase].values()) == pytest.approx(1.0, rel=1e-3)
    assert len(found["switches"]) > 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# ---- the page


def _kept(auto: Mapping[str, float], **others: Mapping[str, float]) -> Kept:
    """Numbers of one model and server, each figure of a phase the same."""
    every = {"auto": auto} | {name.replace("_", "-"): one for name, one in others.items()}
    found: Numbers = {
        name: {"phases": {phase: dict.fromkeys(FIGURES, one[phase]) for phase in PHASES}}
        for name, one in every.items()
    }
    return Kept("abcdef0", [{"m": {"s": found}}])


def test_a_ratio_is_to_the_fixed_layout_that_is_best_in_that_phase() -> None:
    found = _kept(
        {"low": 3.0, "burst": 6.0, "after": 5.0},
        static_dp={"low": 4.0, "burst": 5.0, "after": 4.0},
        static_tp8={"low": 2.0, "burst": 10.0, "after": 5.0},
    )
    far = phases.worst(found, "m", "s", "auto")
    assert (far.ratios, far.phase) == ([1.5], "low")
    assert phases.worst(found, "m", "s", "static-dp").ratios == [2.0]
    assert phases.worst(found, "m", "s", "auto", ["burst"]).ratios == [1.2]


def test_two_servers_are_near_the_best_and_no_switch_waits() -> None:
    """Causes that the page names are in the numbers."""
    found = kept("phases")
    for server in (PRODUCT, GRAPHS):
        runs = [one[MODEL][server]["auto"] for one in found.seeds]
        modes = {row["mode"] for run in runs for row in run["switches"] if row["waited_s"] > 1.0}
        assert not modes
    within = {
        (model, server)
        for model in MODELS
        for server in (PRODUCT, GRAPHS)
        if phases.worst(found, model, server, "auto").mean <= 1.05
    }
    assert within == {(MODEL, PRODUCT), (MODEL, GRAPHS)}
    for one, server in itertools.product(found.seeds, (PRODUCT, GRAPHS)):
        there = one[MODEL][server]
        assert all(there["auto"]["layouts"][phase] == {"1 x TP8": 1.0} for phase in PHASES)
        for phase in PHASES:
            best = min(there, key=lambda name, p=phase: there[name]["phases"][p]["mean_e2el_ms"])
            assert best in ("auto", "static-tp8")


@pytest.mark.parametrize(
    ("server", "left", "count", "mean_s"),
    [(PRODUCT, {"1 x TP8"}, 6, 21.8), (GRAPHS, {"4 x TP2", "2 x TP4"}, 4, 22.4)],
)
def test_nemotron_goes_apart_late_in_bursts(
    server: str, left: set[str], count: int, mean_s: float
) -> None:
    runs = [one["nemotron-8b"][server]["auto"] for one in kept("phases").seeds]
    late = [
        row
        for run in runs
        for row in run["switches"]
        if row["phase"] == "burst" and row["into_phase_s"] > 9.0
    ]
    assert {row["from"] for row in late} == left
    assert {row["to"] for row in late} == {"8 x TP1"}
    assert len(late) == count
    assert mean(row["into_phase_s"] for row in late) == pytest.approx(mean_s, abs=0.05)


@pytest.mark.parametrize(
    ("server", "layout", "share", "apart_e2e", "apart_ttft"),
    [
        (PRODUCT, "1 x TP8", (0.99, 1.0), (0.94, 0.96), (1.55, 1.7)),
        (GRAPHS, "2 x TP4", (0.9, 0.96), (0.93, 0.97), (1.45, 1.65)),
    ],
)
def test_low_phases_keep_a_wide_layout_for_its_first_tokens(
    server: str,
    layout: str,
    share: tuple[float, float],
    apart_e2e: tuple[float, float],
    apart_ttft: tuple[float, float],
) -> None:
    for one in kept("phases").seeds:
        auto, apart = (one["gpt-oss-120b"][server][name] for name in ("auto", "static-dp"))
        assert share[0] <= auto["layouts"]["low"][layout] <= share[1]
        e2e, ttft = (
            apart["phases"]["low"][figure] / auto["phases"]["low"][figure]
            for figure in ("mean_e2el_ms", "mean_ttft_ms")
        )
        assert apart_e2e[0] <= e2e <= apart_e2e[1]
        assert apart_ttft[0] <= ttft <= apart_ttft[1]


@pytest.mark.parametrize(
    ("server", "name"),
    [(STOCK, "stock-dp"), (STOCK, "shift-parallel"), (GRAPHS, "static-tp8")],
)
def test_phases_are_simulated_as_they_are_kept(server: str, name: str) -> None:
    """The shortest runs, of systems that decide nothing."""
    then = kept("phases").seeds[0][MODEL][server][name]
    one = next(one for one in systems(server, MODEL, FIRST) if one.name == name)
    workload = phases_load.load(MODEL, FIRST.seed)
    found = phases_runs.measure_system(one, MODEL, workload, list(spans(BURSTS[MODEL])))
    for phase in PHASES:
        for figure, value in found["phases"][phase].items():
            assert value == pytest.approx(then["phases"][phase][figure], rel=1e-4), figure


def test_the_headline_has_the_worst_of_auto_and_the_best_of_fixed_layouts() -> None:
    found = kept("phases")
    text = phases.headline(found)
    ratios = [
        phases.worst(found, model, server, "auto").mean
        for model in MODELS
        for server in (PRODUCT, GRAPHS)
    ]
    assert f"it is on {sum(ratio <= 1.05 for ratio in ratios)} of 6" in text
    assert f"its worst is {number(max(ratios))}." in text


def test_thresholds_of_the_fork_are_found_on_a_load_below_capacity() -> None:
    """The requests of each phase arrive more slowly than stock DP serves them."""
    for model in MODELS:
        workload = fork_thresholds.load(model)
        for span in spans(fork_thresholds.BURSTS):
            arrived = sum(span.start_s <= one.arrival_s < span.end_s for one in workload.requests)
            rate_rps = arrived / (span.end_s - span.start_s)
            assert rate_rps < 0.95 * CAPACITY_RPS[model], span.phase


def test_benchmarks_begin_with_the_best_single_layout_of_stock() -> None:
    text = phases_whole.headline(kept("phases"))
    measured = live.BENCHMARKS.read_text(encoding="utf-8").partition(live.BEGIN)[2]
    words = " ".join(measured.split())
    assert text in words
    assert words.index("best *single* layout of stock") < words.index("own server")
    assert "Shift Parallelism" in text


def test_the_whole_load_weighs_each_phase_by_its_requests() -> None:
    run = {
        "phases": {
            phase: {"requests": count, "mean_e2el_ms": value}
            for phase, count, value in (("low", 1, 10.0), ("burst", 8, 20.0), ("after", 1, 30.0))
        }
    }
    assert phases_whole.whole(run, "mean_e2el_ms") == pytest.approx(20.0)


def test_the_page_lists_every_run_of_the_load() -> None:
    """Three runs until the next one, whose numbers replace the last."""
    page = (phases.PAGE.name, kept("phases"))
    runs = [one["commit"] for one in run_history.read()[page[0]]]
    assert runs[:3] == ["811d213", "048e7d0", "b2ac7ab"]
    lines = run_history.section(*page, phases.run_cells(page[1]))
    assert all(any(commit in line for line in lines) for commit in runs)


def test_the_reason_that_policies_explains_is_a_kept_one() -> None:
    """Another run of the load needs another example."""
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    section = page.partition("### One switch, part by part")[2].partition("\n### ")[0]
    values = re.findall(r"^\|[^|]*\| `([^|]+)` \| ", section, re.M)
    runs = kept("phases").seeds[0]["gpt-oss-120b"][PRODUCT]["auto"]
    (switch,) = (one for one in runs["switches"] if one["at_s"] == 183.8)
    assert " ".join(values[2:5]) == switch["reason"].replace("requests/s,", "requests/s")
    assert [float(value) for value in values[5:]] == [
        round(switch[name], 2) for name in ("gain", "needed", "cost")
    ]
    assert values[1] == switch["mode"]
