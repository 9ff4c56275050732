"""Clients of every kind get stock vLLM's answers, field by field, while the layout changes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flying_serving.config import MODES
from harness.live import Server, tiny
from tests.deep.server.as_stock.answers import ask, differences
from tests.deep.server.as_stock.calls import CALLS
from tests.deep.server.as_stock.record import PARSERS, SHAPE, recorded
from tests.deep.server.as_stock.speaker import NAME, write_speaker

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("stock's answers were recorded on the CPU"),
]

ENGINES = 2
LAYOUTS = ([[0], [1]], [[0, 1]])
CLIENTS = 8
BETWEEN_S = (0.05, 0.3)
"""The shortest and the longest time from one switch to the next."""
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_speaker(tiny(SHAPE), tmp_path_factory.mktemp("models") / NAME)
    with Server(model, ENGINES, *PARSERS) as live:
        yield live


@pytest.fixture(scope="module")
def ours(server: Server) -> Answers:
    """The answers to all calls, made by several clients while the layout changes at random."""
    draw = random.Random(45)
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = {name: pool.submit(ask, server.http, call) for name, call in CALLS.items()}
        while not all(answer.done() for answer in answers.values()):
            server.layout(draw.choice(LAYOUTS), draw.choice(MODES))
            time.sleep(draw.uniform(*BETWEEN_S))
        return {name: answer.result() for name, answer in answers.items()}


@pytest.fixture(scope="module")
def stock() -> Answers:
    return recorded()


@pytest.mark.parametrize("name", CALLS)
def test_answer_is_that_of_stock(ours: Answers, stock: Answers, name: str) -> None:
    assert list(differences(ours[name], stock[name])) == []


def test_layout_has_changed_in_every_mode_meanwhile(server: Server, ours: Answers) -> None:
    assert {switch["mode"] for switch in server.switches()} == set(MODES)
    steps = server.metric("flying:step_duration_seconds_count", "group_size")
    assert set(steps) == {("1",), ("2",)}
    server.until_idle()
    server.check()
