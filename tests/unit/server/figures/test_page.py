"""What Prometheus reads of a controller, its switches and engines; and that the documentation says
the same.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flying_serving.controller.controller import Controller
from flying_serving.controller.fault_recovery import OrphanCounts
from flying_serving.controller.requests import RequestSpec
from flying_serving.layout.groups import Layout
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import STEP_BOUNDS_S, TABLE
from flying_serving.predict.migrations import MigrationCost
from flying_serving.server.engine_record import Loss
from flying_serving.server.figures.page import (
    Page,
    Published,
    put_controller,
    put_engine,
    put_lanes,
    put_losses,
    put_switches,
)
from flying_serving.server.figures.predictions import Predictions
from flying_serving.server.figures.switches import SwitchTally
from flying_serving.wire import EngineFigures, EngineMemory, MigrationCounts, decode, encode
from tests.unit.controller.model_settings import ANSWER, settings
from tests.unit.policy.costs import costs, measured
from tests.unit.server.figures.states import losses_of

DOCS = Path(__file__).parents[4] / "docs" / "operations.md"
FIGURES = EngineFigures(
    hard=True,
    requests={1: (3, 1), 2: (2, 0)},
    lent_blocks={2: 7, 4: 0},
    steps={1: Histogram(STEP_BOUNDS_S).row, 2: [0.3, *[0] * 6, 1, *[0] * 6]},
    token_parallel={2: 6},
    prefix_cache={1: (100, 32), 2: (50, 0)},
    migrations=MigrationCounts(5, 640, 2),
    memory=EngineMemory(9_000, 5_000, 4_096),
)


def read(put: Callable[..., None], *figures: Any) -> dict[str, float]:
    """Samples of what is put on a page, by name and labels in the order of their names, without the
    model's name.
    """
    page, registry, published = Page("llama"), CollectorRegistry(), Published()
    put(page, *figures)
    published.metrics = page.metrics
    registry.register(published)
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "llama"
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_the_documentation_lists_exactly_these() -> None:
    """Name, type, labels, unit and meaning, row by row."""
    rows = [
        line
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `flying:")
    ]
    expected = [
        f"| `{f.name}` | {f.kind} | {', '.join(f'`{label}`' for label in f.labels)} | {f.unit} | "
        f"{f.meaning} |"
        for f in TABLE
    ]
    assert [re.sub(r" +", " ", row) for row in rows] == [
        re.sub(r" +", " ", row) for row in expected
    ]


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_names_follow_the_conventions(family: object) -> None:
    """Base units at the end, `_total` for counters and nothing else."""
    name, kind, unit = family.name, family.kind, family.unit  # type: ignore[attr-defined]
    assert re.fullmatch(r"flying:[a-z_]+", name)
    assert name.endswith("_total") == (kind == "counter")
    assert (unit == "seconds") == (re.search(r"(?<!request)_seconds$", name) is not None)
    assert (unit == "request-seconds") == name.endswith("request_seconds_total")


def test_layout_and_pool() -> None:
    """Each engine has the size and the degree of its group; the pool's age is that of its head."""
    controller = Controller(settings("static-dp"))
    controller.state.layout = Layout(((0, 1), (2,), (3,)))
    found = read(put_controller, controller, 2, 50.0)
    assert found["flying:layout_info{2+1+1}"] == 1
    assert [found[f"flying:engine_group_size{{{engine}}}"] for engine in range(4)] == [2, 2, 1, 1]
    assert [found[f"flying:engine_degree{{{engine}}}"] for engine in range(4)] == [4, 4, 2, 2]
    assert found["flying:pool_requests{}"] == found["flying:pool_oldest_age_seconds{}"] == 0


def test_the_age_of_the_pool_is_that_of_its_head() -> None:
    """All slots of all engines are taken, the others wait."""
    controller = Controller(settings("load", max_num_seqs=1))
    for number in range(7):
        controller.arrived(f"r{number}", RequestSpec(20, 30), 10.0 + number)
    found = read(put_controller, controller, 1, 50.0)
    assert found["flying:pool_requests{}"] == len(controller.state.pool) > 0
    assert controller.state.pool.oldest_s is not None
    assert found["flying:pool_oldest_age_seconds{}"] == 50.0 - controller.state.pool.oldest_s > 0


def test_splits_are_counted_by_where_they_are() -> None:
    controller = Controller(settings("manual"))
    controller.state.migrates = {2: MigrationCost(1e-4, 1e-7)}
    controller.state.steps.calibrate(measured(costs((1, 2, 4))))
    for name, at in {"a": 5, "b": 6, "c": 10}.items():
        controller.arrived(name, RequestSpec(10, 30, 20, split_at=at), 1.0)
    controller.prefix_ended("a", 2.0, failed=False)
    controller.prefix_ended("b", 2.0, failed=True)
    found = read(put_controller, controller, 1, 50.0)
    assert [found[f"flying:splits_total{{{where}}}"] for where in ("prompt", "output")] == [2, 1]
    assert found["flying:splits_undone_total{}"] == 1
    assert found["flying:split_requests{}"] == 1


def test_lanes_of_older_layouts_are_woven_or_paused() -> None:
    """Those with requests; by what the engine says, whose last order it was."""
    controller = Controller(settings("manual", engines=2))
    controller.arrived("r", RequestSpec(10, 20), 1.0)
    group = controller.state.group_of("r")
    assert group in ((0,), (1,))
    controller.begin_switch(Layout.uniform(2, 2), "weave", None, 2.0)
    for figures, state in (({}, "woven"), ({0: FIGURES, 1: FIGURES}, "paused")):
        set_ = sorted(
            name for name, value in read(put_lanes, controller, (1, 2), figures).items() if value
        )
        present = [f"flying:lane_state{{{engine},2,present}}" for engine in (0, 1)]
        assert set_ == sorted([*present, f"flying:lane_state{{{group[0]},1,{state}}}"])


def test_a_lost_engine_has_no_lane_and_no_group() -> None:
    """Nor has the group that it was in; the others have theirs."""
    controller = Controller(settings("manual", engines=2))
    controller.begin_switch(Layout.uniform(2, 2), "weave", None, 2.0)
    controller.acknowledged([ANSWER], 2.1)
    controller.engines_lost([1], 3.0)
    found = read(put_lanes, controller, (1, 2), {})
    assert {name for name, value in found.items() if value} == {"flying:lane_state{0,1,present}"}
    assert [name for name in found if name.startswith("flying:lane_state{1")] == []
    found = read(put_controller, controller, 1, 4.0)
    assert found["flying:engine_degree{0}"] == 1 and "flying:engine_degree{1}" not in found


def test_losses_are_counted_by_engine_and_reason() -> None:
    """From 0, so that rates begin there; an engine is up again when it is back."""
    losses, orphans, layout = losses_of(2), OrphanCounts(4, 1), Layout.uniform(2, 1)
    for frozen in (False, True):
        losses.lost(1, Loss(1.0, "why"), layout, frozen=frozen)
    losses.not_started(1, "no")
    found = read(put_losses, losses, orphans)
    assert [found[f"flying:engine_up{{{engine}}}"] for engine in (0, 1)] == [1, 0]
    reasons = ("ended", "frozen", "start")
    assert [found[f"flying:engine_losses_total{{1,{reason}}}"] for reason in reasons] == [1, 1, 1]
    assert [found[f"flying:engine_losses_total{{0,{reason}}}"] for reason in reasons] == [0, 0, 0]
    assert found["flying:engine_back_seconds_count{}"] == 0
    assert [
        found[f"flying:orphaned_requests_total{{{what}}}"] for what in ("requeued", "failed")
    ] == [4, 1]
    losses.back(1, layout)
    found = read(put_losses, losses, orphans)
    assert found["flying:engine_up{1}"] == 1
    assert found["flying:engine_back_seconds_count{}"] == 1


def test_an_engines_own_figures_come_back_as_they_were_sent() -> None:
    found = read(put_engine, 3, decode("flying_metrics", encode(FIGURES)))
    assert found["flying:lane_requests_running{3,1}"] == 3
    assert found["flying:lane_requests_waiting{3,1}"] == 1
    assert found["flying:lent_blocks{3,2}"] == 7
    assert found["flying:lent_weight_bytes{3}"] == 4096
    assert found["flying:prefix_cache_queries_total{3,1}"] == 100
    assert found["flying:prefix_cache_hits_total{3,1}"] == 32
    assert found["flying:kv_pulled_requests_total{3}"] == 5
    assert found["flying:kv_pulled_tokens_total{3}"] == 640
    assert found["flying:kv_prefilled_again_requests_total{3}"] == 2
    assert found["flying:token_parallel_steps_total{3,2}"] == 6
    assert "flying:token_parallel_steps_total{3,1}" not in found
    assert found["flying:step_duration_seconds_sum{3,2}"] == pytest.approx(0.3)
    assert found["flying:step_duration_seconds_count{3,2}"] == 1
    assert found["flying:step_duration_seconds_bucket{3,2,0.05}"] == 0
    assert found["flying:step_duration_seconds_bucket{3,2,0.1}"] == 1
    assert found["flying:step_duration_seconds_count{3,1}"] == 0


def test_switches_are_counted_by_kind_from_the_start() -> None:
    """Those of every way to switch are there from the start, so that rates begin at 0."""
    controller, tally = Controller(settings("manual", engines=2)), SwitchTally()
    predictions = Predictions(settings().objective)
    controller.begin_switch(Layout.uniform(2, 2), "soft", None, 2.0)
    controller.acknowledged([ANSWER], 2.1)
    tally.update(controller.state.switches.kept)
    predictions.count, predictions.gain, predictions.cost = 3, 4.0, 5.0
    predictions.checked, predictions.predicted, predictions.measured = 6, 7.0, 8.0
    found = read(put_switches, tally, predictions)
    assert found["flying:switches_total{1+1,soft,operator,2}"] == 1
    assert found["flying:switch_failures_total{soft}"] == 0
    assert found["flying:switch_cutover_seconds_count{soft}"] == 1
    assert found["flying:switch_cutover_seconds_sum{soft}"] == pytest.approx(0.002)
    assert found["flying:switch_drain_seconds_count{hard}"] == 0
    names = [
        "switch_predictions",
        "switch_predicted_gain_request_seconds",
        "switch_predicted_cost_request_seconds",
    ]
    assert [found[f"flying:{name}_total{{}}"] for name in names] == [3, 4, 5]
    names = [
        "checked_predictions",
        "checked_predicted_request_seconds",
        "checked_measured_request_seconds",
    ]
    assert [found[f"flying:{name}_total{{}}"] for name in names] == [6, 7, 8]
