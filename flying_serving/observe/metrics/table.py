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


TABLE = (
    Family("flying:layout_info", "gauge", ("layout",), "1", "The present layout: sizes of its groups in order."),
    Family("flying:engine_group_size", "gauge", ("engine",), "engines", "Engines in this engine's group."),
    Family("flying:engine_degree", "gauge", ("engine",), "devices", "Devices in this engine's group: its TP degree."),
    Family(
        "flying:engine_unanswered_seconds",
        "gauge",
        ("engine",),
        "seconds",
        "For how long the engine has not answered what /metrics asked it; 0 if it has. "
        "Figures that only an engine knows are then those of its last answer.",
    ),
    Family(
        "flying:lane_state",
        "gauge",
        ("engine", "group_size", "state"),
        "0 or 1",
        "bound: the layout has this group. woven: it does not, but requests of the group are left and take turns with "
        "the bound lane. paused: the same after a hard switch, so they stand still while the bound lane works.",
    ),
    Family(
        "flying:lane_requests_running",
        "gauge",
        ("engine", "group_size"),
        "requests",
        "Requests that run in groups which this engine leads.",
    ),
    Family(
        "flying:lane_requests_waiting",
        "gauge",
        ("engine", "group_size"),
        "requests",
        "Requests that wait in the scheduler of a group which this engine leads.",
    ),
    Family(
        "flying:lent_blocks",
        "gauge",
        ("engine", "group_size"),
        "blocks",
        "KV blocks that this engine has lent to its group of this size.",
    ),
    Family(
        "flying:prefix_cache_queries_total",
        "counter",
        ("engine", "group_size"),
        "tokens",
        "Prompt tokens that were looked up in the prefix cache of a group which this engine leads.",
    ),
    Family(
        "flying:prefix_cache_hits_total",
        "counter",
        ("engine", "group_size"),
        "tokens",
        "Those of them that it had.",
    ),
    Family(
        "flying:step_duration_seconds",
        "histogram",
        ("engine", "group_size"),
        "seconds",
        "Steps of groups which this engine leads, from the plan to the output.",
        STEP_BOUNDS_S,
    ),
    Family("flying:pool_requests", "gauge", (), "requests", "Requests in the task pool: no group has them yet."),
    Family(
        "flying:pool_oldest_age_seconds",
        "gauge",
        (),
        "seconds",
        "Time since the arrival of the request at the head of the task pool; 0 if it is empty.",
    ),
    Family(
        "flying:switches_total",
        "counter",
        ("from_layout", "to_layout", "reason", "mode"),
        "switches",
        "Changes of layout that all engines have made. reason: load, priority, context, context+priority, idle (no "
        "request needs a group any more) or operator.",
    ),
    Family(
        "flying:switch_failures_total",
        "counter",
        ("mode",),
        "switches",
        "Changes of layout that some engine did not answer.",
    ),
    Family(
        "flying:switch_cutover_seconds",
        "histogram",
        ("mode",),
        "seconds",
        "From the order until the last engine works in the new layout.",
        CUTOVER_BOUNDS_S,
    ),
    Family(
        "flying:switch_drain_seconds",
        "histogram",
        ("mode",),
        "seconds",
        "From the order until the last request of a group that went away has ended.",
        DRAIN_BOUNDS_S,
    ),
    Family(
        "flying:switch_worst_token_gap_seconds",
        "histogram",
        ("mode",),
        "seconds",
        "The longest time between two outputs of any stream, from the order until the end of the drain.",
        GAP_BOUNDS_S,
    ),
    Family("flying:switch_predictions_total", "counter", (), "switches", "Switches for load: each has a prediction."),
    Family(
        "flying:switch_predicted_gain_request_seconds_total",
        "counter",
        (),
        "request-seconds",
        "What they were predicted to save over the horizon.",
    ),
    Family(
        "flying:switch_predicted_cost_request_seconds_total",
        "counter",
        (),
        "request-seconds",
        "What they were predicted to cost.",
    ),
    Family(
        "flying:checked_predictions_total",
        "counter",
        (),
        "switches",
        "Those whose horizon has passed without another switch, so that something could be measured.",
    ),
    Family(
        "flying:checked_predicted_request_seconds_total",
        "counter",
        (),
        "request-seconds",
        "What was predicted for the new layout and the switch to it.",
    ),
    Family(
        "flying:checked_measured_request_seconds_total",
        "counter",
        (),
        "request-seconds",
        "What was measured.",
    ),
)
