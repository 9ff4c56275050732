"""Every metric of ours that `/metrics` shows: the one list that code, documentation and tests share.

Names and labels follow Prometheus' rules (base units, `_total` for counters) and vLLM's (a prefix with a colon,
`model_name` and `engine`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CUTOVER_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
DRAIN_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
GAP_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)

LANE_STATES = ("bound", "woven", "paused")


@dataclass(frozen=True)
class Family:
    """One metric.

    Args:
        name: as `/metrics` shows it; of a histogram without `_bucket`, `_sum`, `_count`.
        labels: beside `model_name`, which all have.
        unit: of its values.
        meaning: one sentence or two.
        bounds: of a histogram's buckets.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    unit: str
    meaning: str
    bounds: tuple[float, ...] = ()


ENGINE, LANE = ("engine",), ("engine", "group_size")
REQUEST_S = "request-seconds"


def _gauge(name: str, labels: tuple[str, ...], unit: str, meaning: str) -> Family:
    return Family(name, "gauge", labels, unit, meaning)


def _counter(name: str, labels: tuple[str, ...], unit: str, meaning: str) -> Family:
    return Family(name, "counter", labels, unit, meaning)


def _seconds(name: str, labels: tuple[str, ...], bounds: tuple[float, ...], meaning: str) -> Family:
    return Family(name, "histogram", labels, "seconds", meaning, bounds)


TABLE = (
    _gauge("flying:layout_info", ("layout",), "1", "The present layout: sizes of its groups in order."),
    _gauge("flying:engine_group_size", ENGINE, "engines", "Engines in this engine's group."),
    _gauge("flying:engine_degree", ENGINE, "devices", "Devices in this engine's group: its TP degree."),
    _gauge(
        "flying:engine_unanswered_seconds",
        ENGINE,
        "seconds",
        "How long the engine has not answered a scrape; 0 if it has. "
        "Figures that only an engine knows are then those of its last answer.",
    ),
    _gauge(
        "flying:lane_state",
        (*LANE, "state"),
        "0 or 1",
        "bound: the layout has this group. woven: it does not, but the group still has requests, whose steps alternate "
        "with the bound lane's. paused: the same after a hard switch; they pause while the bound lane works.",
    ),
    _gauge("flying:lane_requests_running", LANE, "requests", "Running requests of groups that the engine leads."),
    _gauge(
        "flying:lane_requests_waiting",
        LANE,
        "requests",
        "Requests that wait in the schedulers of groups that the engine leads.",
    ),
    _gauge("flying:lent_blocks", LANE, "blocks", "KV blocks that the engine lent to its group of this size."),
    _counter(
        "flying:prefix_cache_queries_total",
        LANE,
        "tokens",
        "Prompt tokens looked up in the prefix cache of a group that the engine leads.",
    ),
    _counter("flying:prefix_cache_hits_total", LANE, "tokens", "Those of them that the cache had."),
    _seconds(
        "flying:step_duration_seconds",
        LANE,
        STEP_BOUNDS_S,
        "Steps of groups that the engine leads, from the plan to the output.",
    ),
    _gauge("flying:pool_requests", (), "requests", "Requests in the task pool: no group has them yet."),
    _gauge(
        "flying:pool_oldest_age_seconds",
        (),
        "seconds",
        "Time since the arrival of the request at the head of the task pool; 0 if it is empty.",
    ),
    _counter(
        "flying:switches_total",
        ("from_layout", "to_layout", "reason", "mode"),
        "switches",
        "Changes of layout that all engines have made. reason: load, priority, context, context+priority, idle (no "
        "request needs a group any more) or operator.",
    ),
    _counter(
        "flying:switch_failures_total", ("mode",), "switches", "Changes of layout that some engine did not answer."
    ),
    _seconds(
        "flying:switch_cutover_seconds",
        ("mode",),
        CUTOVER_BOUNDS_S,
        "From the order until the last engine works in the new layout.",
    ),
    _seconds(
        "flying:switch_drain_seconds",
        ("mode",),
        DRAIN_BOUNDS_S,
        "From the order until the last request of a dissolved group has ended.",
    ),
    _seconds(
        "flying:switch_worst_token_gap_seconds",
        ("mode",),
        GAP_BOUNDS_S,
        "The longest time between two outputs of any stream, from the order until the end of the drain.",
    ),
    _counter("flying:switch_predictions_total", (), "switches", "Switches for load: each has a prediction."),
    _counter(
        "flying:switch_predicted_gain_request_seconds_total", (), REQUEST_S, "Their predicted savings over the horizon."
    ),
    _counter("flying:switch_predicted_cost_request_seconds_total", (), REQUEST_S, "Their predicted cost."),
    _counter(
        "flying:checked_predictions_total",
        (),
        "switches",
        "Those whose horizon has passed without another switch, so that the outcome was measured.",
    ),
    _counter(
        "flying:checked_predicted_request_seconds_total",
        (),
        REQUEST_S,
        "Prediction for the new layout and the switch to it.",
    ),
    _counter("flying:checked_measured_request_seconds_total", (), REQUEST_S, "Measurement of the same."),
)
