"""Loads that the policy's constants were not chosen on, and the aims on them."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from experiments import held_out
from experiments.common import FIRST, MODELS, Kept, kept
from experiments.held_out_load import (
    BATCH,
    LOADS,
    MOST_PROMPT,
    OTHER_SHARE,
    SECONDS,
    STATE_SHARES,
    TRACE_CAPACITY_RPS,
    TRACES,
    Load,
    trace_capacity_rps,
    workload,
)
from experiments.held_out_ratios import Place, best, is_restless, is_slow, places, ratios, runs
from experiments.held_out_runs import (
    SETTLE_S,
    SHIFT,
    compared,
    constants,
    measure_system,
    per_minute,
)
from experiments.phases_load import CAPACITY_RPS
from experiments.servers import GRAPHS, MAX_TOKENS, PRODUCT, SERVERS, STOCK, is_fixed
from flying_serving.predict import arrivals

MODEL = "llama-3-70b"
PLAN = (Path(held_out.__file__).parent / "plans" / "held_out.md").read_text(encoding="utf-8")


# ---- the loads


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_load_has_the_mean_rate_of_its_name(load: Load) -> None:
    """In the mean of four seeds; the traces and the modulated process are bursty."""
    capacity_rps = TRACE_CAPACITY_RPS.get(load.family, CAPACITY_RPS)[MODEL]
    rates = [len(workload(load, MODEL, seed).requests) / SECONDS[MODEL] for seed in range(1, 5)]
    tolerance = 0.15 if load.is_constant else 0.35
    assert mean(rates) == pytest.approx(load.share * capacity_rps, rel=tolerance)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_lengths_are_cut_where_the_plan_says(load: Load) -> None:
    drawn = workload(load, MODEL, FIRST.seed)
    assert max(one.prompt_tokens for one in drawn.requests) <= MOST_PROMPT
    assert max(one.output_tokens for one in drawn.requests) <= MAX_TOKENS


def test_each_batch_arrives_together_as_one_event() -> None:
    drawn = workload(Load("batches", 0.5), MODEL, FIRST.seed)
    assert set(Counter(one.event for one in drawn.requests).values()) == {BATCH}
    assert len({(one.event, one.arrival_s) for one in drawn.requests}) == (
        len(drawn.requests) // BATCH
    )


def test_gaps_of_the_gamma_load_vary_twice_as_much_as_their_mean() -> None:
    times = [one.arrival_s for one in workload(Load("gamma", OTHER_SHARE), MODEL, 1).requests]
    gaps = [after - before for before, after in pairwise(times)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(2.0, rel=0.15)


def test_the_modulated_load_has_seconds_of_both_rates() -> None:
    times = [one.arrival_s for one in workload(Load("modulated", 0.39), "gpt-oss-120b", 1).requests]
    per_s = sorted(Counter(map(int, times)).values())
    low_rps, high_rps = (share * CAPACITY_RPS["gpt-oss-120b"] for share in STATE_SHARES)
    assert per_s[len(per_s) // 10] == pytest.approx(low_rps, rel=0.4)
    assert per_s[-len(per_s) // 10] == pytest.approx(high_rps, rel=0.2)


@pytest.mark.parametrize("name", TRACES)
def test_another_seed_replays_another_part_of_a_trace(name: str) -> None:
    load = Load(name, OTHER_SHARE)
    first, second = (workload(load, MODEL, seed).requests for seed in (1, 2))
    assert [one.prompt_tokens for one in first] != [one.prompt_tokens for one in second]


def test_capacity_for_a_trace_is_found_again() -> None:
    """The plan's is of the cost model before it was fitted to steps as graphs."""
    name = "mooncake conversation"
    assert trace_capacity_rps(name, MODEL) == pytest.approx(
        TRACE_CAPACITY_RPS[name][MODEL], rel=0.1
    )


def test_the_plan_has_the_loads_that_are_run() -> None:
    for model in MODELS:
        capacities = " | ".join(f"{TRACE_CAPACITY_RPS[name][model]:g}" for name in TRACES)
        assert f"| {model} | {capacities} | {SECONDS[model]:g} |" in PLAN
    for load in LOADS:
        row = next(line for line in PLAN.splitlines() if line.startswith(f"| {load.family} |"))
        assert f"{load.share:g}" in row
        assert row.endswith(f"| {'no' if load.is_held_out else 'yes'} |")
        assert row.split(" | ")[-2] == ("no" if load.is_constant else "yes")


# ---- figures and aims


def test_switches_of_the_begin_and_after_the_last_arrival_do_not_count() -> None:
    decided_s = [1.0, SETTLE_S - 0.1, SETTLE_S, 100.0, SETTLE_S + 120.1]
    assert per_minute(decided_s, SETTLE_S + 120.0) == 1.0


def test_constants_are_read_where_the_policy_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "CHANGE_S", 17.0)
    assert constants()["CHANGE_S"] == 17.0
    assert json.loads(json.dumps(constants())).keys() == constants().keys()


def _kept(auto_ms: tuple[float, float], switches: tuple[float, float], load: Load) -> Kept:
    """Numbers of two seeds of one load, whose best fixed layout has 100 ms."""
    means = [dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), ms) for ms in auto_ms]
    slower, best = (dict.fromkeys(means[0], ms) for ms in (150.0, 100.0))
    return Kept(
        "abcdef0",
        [
            {
                "m": {
                    "s": {
                        load.name: {
                            "auto": own | {"per_minute": count},
                            "static-dp": slower,
                            "static-tp8": best,
                        }
                    }
                }
            }
            for own, count in zip(means, switches, strict=True)
        ],
    )


def test_mean_e2e_misses_where_the_mean_of_the_seeds_is_above_the_aim() -> None:
    load = Load("steady", 0.5)
    place = Place("m", "s", load)
    assert ratios(_kept((104.0, 101.0), (0.0, 0.0), load), place, "auto") == [1.04, 1.01]
    assert not is_slow(_kept((104.0, 101.0), (0.0, 0.0), load), place)
    assert is_slow(_kept((104.0, 103.0), (0.0, 0.0), load), place)


@pytest.mark.parametrize(("family", "misses"), [("batches", True), ("modulated", False)])
def test_switches_miss_in_one_seed_where_the_rate_does_not_change(
    family: str, misses: bool
) -> None:
    load = Load(family, 0.5)
    found = _kept((100.0, 100.0), (0.0, 1.5), load)
    assert is_restless(found, Place("m", "s", load)) is misses


# ---- the kept numbers


def test_every_load_of_the_plan_is_kept_with_its_requests_served() -> None:
    found = kept("held_out")
    assert len(found.seeds) == 2
    for place in places(SERVERS):
        for one in compared(place.server, place.model, FIRST):
            there = runs(found, place, one.name)
            assert [run["refused"] for run in there] == [0, 0]


@pytest.mark.parametrize("model", MODELS)
def test_stock_has_every_degree_and_shift_parallelism_and_no_fork(model: str) -> None:
    ours, stock = (
        [one.name for one in compared(server, model, FIRST)] for server in (GRAPHS, STOCK)
    )
    degrees = [name.removeprefix("static-") for name in ours if is_fixed(name)]
    assert stock == [SHIFT, *(f"stock-{degree}" for degree in degrees)]


@pytest.mark.parametrize("load", [Load("steady", 0.1), Load("azure code", OTHER_SHARE)])
@pytest.mark.parametrize("server", [GRAPHS, STOCK])
def test_fixed_layouts_are_simulated_as_they_are_kept(load: Load, server: str) -> None:
    """Short runs, of systems that decide nothing."""
    then = kept("held_out").seeds[0][MODEL][server][load.name]
    drawn = workload(load, MODEL, FIRST.seed)
    for one in compared(server, MODEL, FIRST):
        if one.name != "auto":
            assert measure_system(one, MODEL, drawn) == pytest.approx(then[one.name], rel=1e-4)


def test_a_run_of_auto_has_its_switches_and_layouts() -> None:
    auto = next(iter(compared(GRAPHS, MODEL, FIRST)))
    found = measure_system(auto, MODEL, workload(Load("steady", 0.1), MODEL, FIRST.seed))
    assert sum(found["layouts"].values()) == pytest.approx(1.0, rel=1e-3)
    counted = [row for row in found["switches"] if row["at_s"] >= SETTLE_S]
    assert found["per_minute"] * 4.5 == pytest.approx(len(counted), rel=0.05)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# ---- the causes that the page names


def _means(model: str, server: str, load: str) -> list[tuple[float, float, dict[str, float]]]:
    """For each seed: E2E of `auto` over the best own layout, TTFT of engines apart over that of
    `auto`, and shares of layouts.
    """
    found = kept("held_out")
    place = Place(model, server, _load(load))
    runs_of = zip(
        ratios(found, place, "auto"),
        runs(found, place, "auto"),
        runs(found, place, "static-dp"),
        strict=True,
    )
    return [
        (ratio, apart["mean_ttft_ms"] / auto["mean_ttft_ms"], auto["layouts"])
        for ratio, auto, apart in runs_of
    ]


@pytest.mark.parametrize(
    ("model", "server", "load", "apart_ttft"),
    [
        ("gpt-oss-120b", PRODUCT, "steady, 0.1", (1.6, 1.7)),
        ("gpt-oss-120b", GRAPHS, "steady, 0.1", (1.5, 1.7)),
        ("gpt-oss-120b", PRODUCT, "mooncake conversation, 0.4", (1.9, 2.2)),
        ("gpt-oss-120b", GRAPHS, "mooncake conversation, 0.4", (1.9, 2.2)),
        ("nemotron-8b", PRODUCT, "steady, 0.7", (1.4, 1.5)),
    ],
)
def test_wide_layouts_are_kept_for_first_tokens(
    model: str, server: str, load: str, apart_ttft: tuple[float, float]
) -> None:
    for ratio, ttft, shares in _means(model, server, load):
        assert 1.02 <= ratio <= 1.19
        assert apart_ttft[0] <= ttft <= apart_ttft[1]
        assert shares.get("1 x TP8", 0.0) + shares.get("2 x TP4", 0.0) > 0.6


def test_tp_4_of_gpt_oss_is_a_little_better_than_what_auto_keeps() -> None:
    for load in ("steady, 0.5", "steady, 0.7", "batches, 0.5", "batches, 0.7"):
        place = Place("gpt-oss-120b", PRODUCT, _load(load))
        found = kept("held_out")
        assert best(found, place) == "static-tp4"
        assert all(1.01 <= ratio <= 1.21 for ratio in ratios(found, place, "auto"))


def test_nemotron_goes_apart_late_where_that_is_the_best() -> None:
    for load in ("steady, 0.85", "batches, 0.85"):
        for one in runs(kept("held_out"), Place("nemotron-8b", PRODUCT, _load(load)), "auto"):
            first = next(row for row in one["switches"] if row["to"] == "8 x TP1")
            assert 24.0 <= first["at_s"] <= 92.0


def test_llama_leaves_tp_8_for_seconds_with_azure_code() -> None:
    for ratio, _, shares in _means(MODEL, GRAPHS, "azure code, 0.4"):
        assert 1.005 <= ratio <= 1.085
        assert 0.9 <= shares["1 x TP8"] <= 0.98


def test_llama_leaves_tp_8_near_its_capacity_where_that_is_the_best() -> None:
    place = Place(MODEL, GRAPHS, _load("batches, 0.85"))
    assert best(kept("held_out"), place) == "static-tp8"
    for ratio, _, shares in _means(MODEL, GRAPHS, "batches, 0.85"):
        assert 1.07 <= ratio <= 1.19
        assert shares["2 x TP4"] > 0.5


def _load(name: str) -> Load:
    return next(one for one in LOADS if one.name == name)
