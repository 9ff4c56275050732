"""A group lends its weights as on CUDA, with memory of the host in place of the device's.

Answers are stock's, and KV migrates between engines that map each other's arenas.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deep.server.test_lending import (
    APART,
    LONG,
    PAIRS,
    REQUESTS,
    SHORT,
    TOGETHER,
    Lending,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("its worker has memory of the host in place of a device's"),
]

SPLIT = [request for request in SHORT if len(request.prompt) > 32]
"""Requests that one engine begins and another one ends."""


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def server(request: pytest.FixtureRequest) -> Iterator[Lending]:
    with Lending(request.param, "--worker-cls=tests.deep.server.arena_worker.ArenaWorker") as live:
        yield live


def test_answers_are_stock_s_in_every_stage(server: Lending) -> None:
    status = server.status()
    assert status["capacity_tokens"] == {"1": 256, "2": 512, "4": 1024}
    assert status["lent_capacity_tokens"] >= 2048
    with ThreadPoolExecutor(32) as threads:
        for _ in range(2):
            server.layout(TOGETHER)
            for answer in [threads.submit(server.ask, request, 4) for request in REQUESTS]:
                answer.result()
            assert server.stage == "lent"
            server.check()
            server.ask(LONG, 4)
            for layout, degree in ((PAIRS, 2), (APART, 1)):
                server.layout(layout)
                assert server.stage == "whole"
                for answer in [threads.submit(server.ask, request, degree) for request in SHORT]:
                    answer.result()
            server.check()


def migrated(server: Lending) -> int:
    """The requests that have gone to another engine with their KV."""
    return sum(engine["migrations"]["migrated"] for engine in server.status()["engines"])


def test_kv_goes_from_arena_to_arena(server: Lending) -> None:
    """Before weights were lent, and afterwards."""
    for _ in range(2):
        server.layout(APART)
        before = migrated(server)
        for request in SPLIT:
            server.ask(request, 1, split_at=len(request.prompt) + 4)
        assert migrated(server) == before + len(SPLIT)
        server.check()
        server.layout(TOGETHER)
        server.ask(LONG, 4)
