"""Our metrics in the API server: switches are followed at every tick, all else is asked for at each scrape."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import EngineLost
from flying_serving.server.figures.page import Page, Published, put_controller, put_engine, put_lanes, put_switches
from flying_serving.server.figures.predictions import Predictions
from flying_serving.server.figures.switches import SwitchTally
from flying_serving.server.shell import Shell
from flying_serving.wire import EngineFigures

if TYPE_CHECKING:
    from fastapi import FastAPI

PATIENCE_S = 0.5
"""An engine answers between two steps. A scrape waits this long for it, and then shows its last figures."""


class ServerMetrics:
    """What `/metrics` shows of one server."""

    def __init__(self, shell: Shell) -> None:
        self._calls = shell.calls
        self._controller = shell.controller
        self._weights = shell.weights
        self._model_name = shell.model_config.served_model_name
        self._tally = SwitchTally()
        self._predictions = Predictions(shell.controller.settings.objective)
        self._figures: dict[int, EngineFigures] = {}
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._unanswered_since_s: dict[int, float] = {}

    def tick(self, now_s: float) -> None:
        """Follow the switches."""
        for switch in self._tally.update(self._controller.switches.kept):
            self._predictions.begun(switch)
        if self._predictions.watching:
            self._predictions.sample([*self._controller.pool, *self._controller.started.values()], now_s)

    async def page(self) -> Page:
        """The metrics of this moment."""
        await self._ask_engines()
        now_s = time.monotonic()
        self.tick(now_s)
        deployment = self._calls.deployment
        page = Page(self._model_name)
        put_controller(page, self._controller, deployment.devices, now_s)
        put_lanes(page, self._controller, deployment.group_sizes, self._figures)
        for engine in range(deployment.engines):
            since_s = self._unanswered_since_s.get(engine, now_s)
            page.put("flying:engine_unanswered_seconds", now_s - since_s, engine)
        for engine, figures in self._figures.items():
            put_engine(page, engine, figures)
        put_switches(page, self._tally, self._predictions)
        page.put("flying:weight_loans_total", self._weights.loans)
        page.put("flying:weight_fetch_seconds", self._weights.fetch_s)
        return page

    async def _ask_engines(self) -> None:
        for engine in range(self._calls.deployment.engines):
            if engine not in self._asked or self._asked[engine].done():
                self._unanswered_since_s.setdefault(engine, time.monotonic())
                self._asked[engine] = asyncio.get_running_loop().create_task(self._ask(engine))
        await asyncio.wait(self._asked.values(), timeout=PATIENCE_S)

    async def _ask(self, engine: int) -> None:
        try:
            figures = await self._calls.utility(engine, "flying_metrics")
        except (EngineLost, EngineDeadError):
            return  # for how long is what /metrics shows
        self._figures[engine] = figures
        del self._unanswered_since_s[engine]


class FreshMetrics:
    """Middleware: makes the page before a route hands it out. vLLM's runs in a thread, where no engine can be asked.

    `owner`: the application that holds the engine client. `published`: where the route finds the page.
    """

    def __init__(self, app: ASGIApp, owner: FastAPI, published: Published) -> None:
        self._app = app
        self._owner = owner
        self._published = published

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/metrics"):
            metrics: ServerMetrics | None = self._owner.state.engine_client.engine_core.metrics
            if metrics is not None:
                self._published.metrics = (await metrics.page()).metrics
        await self._app(scope, receive, send)
