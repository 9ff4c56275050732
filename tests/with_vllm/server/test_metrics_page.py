"""A scrape asks the engines, waits for none of them for long, and says for how long one has owed an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flying_serving.config import FlyingConfig
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Settings
from flying_serving.errors import EngineLost
from flying_serving.server import metrics as module
from flying_serving.server.engine_record import EnginePhase, EngineRecord
from flying_serving.server.figures.page import Page
from flying_serving.server.figures.predictions import Predictions
from flying_serving.server.metrics import ServerMetrics
from flying_serving.server.shell import Shell
from flying_serving.wire import EngineFigures, EngineMemory, MigrationCounts
from tests.unit.controller.model_settings import settings
from tests.with_vllm.server.doubles import model_config


class Watching(Predictions):
    """Notes which requests it is shown."""

    watching = True
    seen: tuple[str, ...] = ()

    def sample(self, requests: Iterable[RequestState], now_s: float) -> None:
        """Whatever switch there was."""
        self.seen = tuple(request.request_id for request in requests)


class FakeCalls:
    """Two engines that answer with how often they were asked, or not if `silent`, `refusing` or
    `lost` names them.
    """

    def __init__(self) -> None:
        self.deployment = SimpleNamespace(
            engines=2, devices=1, group_sizes=(1, 2), flying=FlyingConfig()
        )
        self.asked = [0, 0]
        self.silent: dict[int, asyncio.Event] = {}
        self.refusing: set[int] = set()
        self.records = [EngineRecord(engine) for engine in (0, 1)]

    @property
    def engines(self) -> list[int]:
        return [engine for engine in (0, 1) if self.reaches(engine)]

    def reaches(self, engine: int) -> bool:
        return self.records[engine].serves

    async def utility(self, engine: int, method: str) -> EngineFigures:
        assert method == "flying_metrics"
        self.asked[engine] += 1
        if engine in self.silent:
            await self.silent[engine].wait()
        if engine in self.refusing:
            raise EngineLost(f"engine {engine} did not answer")
        requests, nothing = {1: (self.asked[engine], 0)}, MigrationCounts(0, 0, 0)
        return EngineFigures(False, requests, {}, {}, {}, {}, nothing, EngineMemory(0, 0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> FakeCalls:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    return FakeCalls()


def metrics_of(calls: FakeCalls, chosen: Settings | None = None) -> ServerMetrics:
    model = model_config()
    model.served_model_name = "llama"
    return ServerMetrics(Shell(calls, chosen or settings("manual", engines=2), model))  # type: ignore[arg-type]


def values(page: Page, name: str) -> list[float]:
    """The samples of one metric, in order."""
    return [
        sample.value for metric in page.metrics if metric.name == name for sample in metric.samples
    ]


async def test_every_scrape_asks_every_engine(calls: FakeCalls) -> None:
    """And shows what they say now."""
    metrics = metrics_of(calls)
    for number in (1, 2):
        page = await metrics.page()
        assert values(page, "flying:lane_requests_running") == [number, number]
        assert values(page, "flying:engine_unanswered_seconds") == [0, 0]


async def test_an_engine_that_is_silent_keeps_its_figures_and_is_asked_once(
    calls: FakeCalls,
) -> None:
    """The time since the question grows until it answers."""
    metrics = metrics_of(calls)
    await metrics.page()
    calls.silent[1] = asyncio.Event()
    ages = []
    for number in (2, 3, 4):
        page = await metrics.page()
        assert values(page, "flying:lane_requests_running") == [number, 1]
        answered, age = values(page, "flying:engine_unanswered_seconds")
        assert answered == 0
        ages.append(age)
    assert 0 < ages[0] < ages[1] < ages[2]
    assert calls.asked[1] == 2
    calls.silent.pop(1).set()
    await metrics.page()
    page = await metrics.page()
    assert values(page, "flying:engine_unanswered_seconds") == [0, 0]


async def test_an_engine_that_is_late_is_asked_again(calls: FakeCalls) -> None:
    """The time still counts from the first question."""
    metrics = metrics_of(calls)
    calls.refusing.add(0)
    first = values(await metrics.page(), "flying:engine_unanswered_seconds")
    second = values(await metrics.page(), "flying:engine_unanswered_seconds")
    assert calls.asked == [2, 2]
    assert second[0] > first[0] > 0
    assert values(await metrics.page(), "flying:lane_requests_running") == [3], (
        "it has said nothing so far"
    )


async def test_a_lost_engine_is_not_asked_and_shows_no_figures(calls: FakeCalls) -> None:
    """Nor for how long it has not answered; also an answer that was on its way is not shown."""
    metrics = metrics_of(calls)
    calls.silent[1] = asyncio.Event()
    await metrics.page()
    calls.records[1].enter(EnginePhase.LOST)
    calls.silent.pop(1).set()
    await asyncio.sleep(0)
    page = await metrics.page()
    assert calls.asked == [2, 1]
    assert values(page, "flying:lane_requests_running") == [2]
    assert values(page, "flying:engine_unanswered_seconds") == [0]


async def test_a_scrape_without_any_engine_is_answered(calls: FakeCalls) -> None:
    """The server is about to end."""
    for record in calls.records:
        record.enter(EnginePhase.LOST)
    assert values(await metrics_of(calls).page(), "flying:engine_unanswered_seconds") == []


async def test_requests_in_pool_and_groups_are_watched(calls: FakeCalls) -> None:
    """In the pool and in groups."""
    metrics = metrics_of(calls, settings("load", engines=2, max_num_seqs=1))
    controller = metrics._shell.controller
    for number in range(5):
        controller.arrived(f"r{number}", RequestSpec(20, 30), 1.0)
    assert len(controller.state.pool) and controller.state.running
    metrics._predictions = watching = Watching(controller.settings.objective)
    metrics.tick(1.0)
    assert sorted(watching.seen) == [f"r{number}" for number in range(5)]


def test_the_parser_takes_a_page_without_samples() -> None:
    """A metric is there by its type line even before its first sample, so names can be compared."""
    text = "# HELP flying:x y\n# TYPE flying:x gauge\n"
    assert [family.name for family in text_string_to_metric_families(text)] == ["flying:x"]
