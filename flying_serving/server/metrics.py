"""Metrics of the API server: it follows switches at every tick, and reads other figures at each
scrape.
"""

import asyncio
import time

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from flying_serving.controller.node_load import NodeLoad, node_load
from flying_serving.server.figures.page import (
    NODE_SERIES,
    Page,
    node_series,
    put_controller,
    put_engine,
    put_lanes,
    put_losses,
    put_node,
    put_switches,
)
from flying_serving.server.figures.predictions import Predictions
from flying_serving.server.figures.switches import SwitchTally
from flying_serving.server.shell import Shell

PATIENCE_S = 0.5
"""The time that a scrape waits for an engine, which answers between two steps. The scrape then
shows its last figures.
"""


class ServerMetrics:
    """The metrics of one server, from its controller, its engines and its switches."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._tally = SwitchTally()
        self._predictions = Predictions(shell.controller.settings.objective)

    def tick(self, now_s: float) -> None:
        """Follow the switches, and sample the requests that check predictions."""
        state = self._shell.controller.state
        for switch in self._tally.update(state.switches.kept):
            self._predictions.begun(switch)
        if self._predictions.watching:
            self._predictions.sample([*state.pool, *state.started.values()], now_s)

    def load(self) -> NodeLoad:
        """Return the load of the whole node at this moment."""
        return node_load(self._shell.controller.state, self._shell.model_config.max_model_len)

    def node_series(self) -> list[Metric]:
        """Return vLLM's gauges of the load as series of the node, where --node-metrics asks for
        them.
        """
        return (
            node_series(self.load(), self._shell.model_config.served_model_name)
            if self._shell.calls.deployment.flying.node_metrics
            else []
        )

    async def page(self) -> Page:
        """Return the metrics of this moment."""
        shell, deployment = self._shell, self._shell.calls.deployment
        if asked := shell.figures.ask(shell.calls.engines):
            await asyncio.wait(asked, timeout=PATIENCE_S)
        now_s = time.monotonic()
        self.tick(now_s)
        page = Page(shell.model_config.served_model_name)
        put_controller(page, shell.controller, deployment.devices, now_s)
        put_node(page, self.load(), draining=bool(shell.draining))
        put_lanes(page, shell.controller, deployment.group_sizes, shell.figures.latest)
        for engine in shell.calls.engines:
            page.put(
                "flying:engine_unanswered_seconds",
                shell.figures.unanswered_s(engine, now_s),
                engine,
            )
        for engine, figures in shell.figures.latest.items():
            put_engine(page, engine, figures)
        put_losses(page, shell.losses, shell.controller.recovery.orphans)
        put_switches(page, self._tally, self._predictions)
        page.put("flying:weight_loans_total", shell.weights.loans)
        page.put("flying:weight_fetch_seconds", shell.weights.fetch_s)
        return page


def drop_engine_series(registry: CollectorRegistry) -> None:
    """Remove vLLM's gauges of NODE_SERIES, which are by engine, from `/metrics`."""
    for name in NODE_SERIES:
        collector = registry._names_to_collectors.get(name)  # noqa: SLF001 - the library finds collectors by no public way
        if collector is not None:
            registry.unregister(collector)
