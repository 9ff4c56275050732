"""The metrics of one moment as Prometheus' client library wants them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from flying_serving.controller.controller import Controller
from flying_serving.controller.fault_recovery import OrphanCounts
from flying_serving.controller.node_load import NodeLoad
from flying_serving.layout.groups import aligned_group
from flying_serving.observe.metrics.histogram import Histogram
from flying_serving.observe.metrics.table import LANE_STATES, STEP_BOUNDS_S, TABLE
from flying_serving.server.figures.losses import Losses
from flying_serving.server.figures.predictions import Predictions
from flying_serving.server.figures.switches import SwitchTally, shape
from flying_serving.wire import EngineFigures

NODE_SERIES = {
    "vllm:num_requests_running": "Requests that run in any engine of the node.",
    "vllm:num_requests_waiting": "Requests that wait, in the task pool or in any engine of the "
    "node.",
    "vllm:kv_cache_usage_perc": "Share of the node's KV memory that running requests use, 0 to 1.",
}
"""vLLM's gauges of running requests, waiting requests and KV usage, of which it has a series for
every engine.
"""
_KINDS = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Page:
    """All metrics of the table, with the samples put in so far. `model_name`: the label that vLLM's
    metrics have.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._families: dict[str, Any] = {
            family.name: _KINDS[family.kind](
                family.name, family.meaning, labels=("model_name", *family.labels)
            )
            for family in TABLE
        }

    @property
    def metrics(self) -> list[Metric]:
        """Return all metrics, also metrics without samples."""
        return list(self._families.values())

    def put(self, name: str, value: float | Histogram, *labels: object) -> None:
        """Put in a sample of a gauge or a counter, or all of a histogram; `labels` in the order of
        the table.
        """
        sample = (value.buckets(), value.sum) if isinstance(value, Histogram) else (value,)
        self._families[name].add_metric([self._model, *map(str, labels)], *sample)


def put_controller(page: Page, controller: Controller, devices: int, now_s: float) -> None:
    """Put in layout, task pool and split requests."""
    layout, pool = controller.state.layout, controller.state.pool
    page.put("flying:layout_info", 1, shape(layout))
    for group in layout.groups:
        for engine in group:
            page.put("flying:engine_group_size", len(group), engine)
            page.put("flying:engine_degree", len(group) * devices, engine)
    page.put("flying:pool_requests", len(pool))
    oldest_s = pool.oldest_s
    page.put("flying:pool_oldest_age_seconds", 0.0 if oldest_s is None else now_s - oldest_s)
    page.put("flying:refused_requests_total", controller.admission.refused)
    counts = controller.state.splits.counts
    page.put("flying:splits_total", counts.prompt, "prompt")
    page.put("flying:splits_total", counts.output, "output")
    page.put("flying:splits_undone_total", counts.undone)
    page.put("flying:split_requests", len(controller.state.splits))


def put_node(page: Page, load: NodeLoad, *, draining: bool) -> None:
    """Put in the load of the node as a whole."""
    page.put("flying:node_requests_running", load.requests_running)
    page.put("flying:node_requests_waiting", load.requests_waiting)
    page.put("flying:node_kv_tokens_used", load.kv_tokens_used)
    page.put("flying:node_kv_tokens_free", load.kv_tokens_free)
    page.put("flying:node_longest_request_tokens", load.longest_request_tokens, "present")
    page.put("flying:node_longest_request_tokens", load.longest_request_tokens_any_layout, "any")
    page.put("flying:node_lost_engines", len(load.lost_engines))
    page.put("flying:node_draining", float(draining))


def put_lanes(
    page: Page, controller: Controller, sizes: Sequence[int], figures: Mapping[int, EngineFigures]
) -> None:
    """Put in the state of each lane of the engines that are in the layout, for each group size."""
    for engine in sorted(controller.state.layout.engines):
        hard = engine in figures and figures[engine].hard
        for size in sizes:
            group = aligned_group(engine, size)
            state = None
            if controller.state.layout.group_of(engine) == group:
                state = "present"
            elif controller.state.loads[group].requests:
                state = "paused" if hard else "woven"
            for lane_state in LANE_STATES:
                page.put("flying:lane_state", float(lane_state == state), engine, size, lane_state)


def put_engine(page: Page, engine: int, figures: EngineFigures) -> None:
    """Put in the figures of an engine."""
    for size, (running, waiting) in figures.requests.items():
        page.put("flying:lane_requests_running", running, engine, size)
        page.put("flying:lane_requests_waiting", waiting, engine, size)
    for size, (queries, hits) in figures.prefix_cache.items():
        page.put("flying:prefix_cache_queries_total", queries, engine, size)
        page.put("flying:prefix_cache_hits_total", hits, engine, size)
    page.put("flying:lent_weight_bytes", figures.memory.lent_bytes, engine)
    page.put("flying:kv_pulled_requests_total", figures.migrations.migrated, engine)
    page.put("flying:kv_pulled_tokens_total", figures.migrations.migrated_tokens, engine)
    page.put("flying:kv_prefilled_again_requests_total", figures.migrations.prefilled_again, engine)
    for size, row in figures.steps.items():
        page.put("flying:step_duration_seconds", Histogram(STEP_BOUNDS_S, row), engine, size)
    for family in (one for one in TABLE if one.figure):
        for size, value in getattr(figures, family.figure).items():
            page.put(family.name, value, engine, size)


def put_losses(page: Page, losses: Losses, orphans: OrphanCounts) -> None:
    """Put in which engines are up, losses since the start, and the outcome for the requests of lost
    engines.
    """
    for engine, counts in losses.counts.items():
        page.put("flying:engine_up", float(engine not in losses.now), engine)
        for reason, count in counts.items():
            page.put("flying:engine_losses_total", count, engine, reason)
    page.put("flying:engine_back_seconds", losses.back_s)
    page.put("flying:orphaned_requests_total", orphans.requeued, "requeued")
    page.put("flying:orphaned_requests_total", orphans.failed, "failed")


def put_switches(page: Page, tally: SwitchTally, predictions: Predictions) -> None:
    """Put in the switches since the start, and the predictions for them."""
    for labels, count in tally.made.items():
        page.put("flying:switches_total", count, *labels)
    for mode, count in tally.failed.items():
        page.put("flying:switch_failures_total", count, mode)
    for name, histograms in (
        ("flying:switch_cutover_seconds", tally.cutover_s),
        ("flying:switch_drain_seconds", tally.drain_s),
        ("flying:switch_worst_token_gap_seconds", tally.worst_gap_s),
    ):
        for mode, histogram in histograms.items():
            page.put(name, histogram, mode)
    page.put("flying:switch_predictions_total", predictions.count)
    page.put("flying:switch_predicted_gain_request_seconds_total", predictions.gain)
    page.put("flying:switch_predicted_cost_request_seconds_total", predictions.cost)
    page.put("flying:checked_predictions_total", predictions.checked)
    page.put("flying:checked_predicted_request_seconds_total", predictions.predicted)
    page.put("flying:checked_measured_request_seconds_total", predictions.measured)


def node_series(load: NodeLoad, model_name: str) -> list[Metric]:
    """Return vLLM's gauges of these names as one series of the whole node, for routers that read
    one engine's.
    """
    values = (load.requests_running, load.requests_waiting, load.kv_usage)
    families = [
        GaugeMetricFamily(name, meaning, labels=("model_name",))
        for name, meaning in NODE_SERIES.items()
    ]
    for family, value in zip(families, values, strict=True):
        family.add_metric([model_name], value)
    return [*families]


class Published:
    """A collector for Prometheus' registry, which may ask from any thread. It returns the last
    page.
    """

    def __init__(self) -> None:
        self.metrics: list[Metric] = []

    def describe(self) -> Iterable[Metric]:
        """Return names and types, which the registry keeps free of duplicates."""
        return Page("").metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last page."""
        return self.metrics
