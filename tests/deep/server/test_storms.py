"""Models that lanes share in ways of their own: what stock vLLM answers at every degree, while the
layout changes in every mode, and through the loss of an engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from flying_serving.config import MODES
from harness import mxfp4_cpu
from harness.live import wait_until
from harness.losing import is_whole, kill
from tests.deep.server.test_same_results import Compared, compare, migrations, run
from tests.stock.requests import REQUESTS, StockRequest

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Case:
    """A shape and its server.

    `preamble`: Python code that runs before it. `replicates`: every member of a group has the KV of
    all tokens.
    """

    shape: str
    preamble: str = ""
    flags: tuple[str, ...] = ()
    replicates: bool = False


CASES = [
    pytest.param(
        Case("gpt-oss-mxfp4", preamble=mxfp4_cpu.PREAMBLE),
        marks=pytest.mark.cpu_only("its kernel of MXFP4 is one for the CPU"),
        id="gpt-oss-mxfp4",
    ),
    pytest.param(Case("gemma4"), id="gemma4"),
    pytest.param(
        # the backend of the recording, also on processors with AMX
        Case("deepseek-v3", flags=("--attention-backend=CPU_MLA",), replicates=True),
        marks=pytest.mark.cpu_only("its recording is of the CPU"),
        id="deepseek-v3",
    ),
]
ENGINES = 4
APART, PAIRS, ALL = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
LAYOUTS = (PAIRS, ALL, [[0], [1], [2, 3]], APART)
ROUNDS = 1
"""Of switches: to each layout in each mode."""
BACK_S = 90.0


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[Compared]:
    with Compared(case.shape, ENGINES, 1, *case.flags, preamble=case.preamble) as live:
        yield live


def test_a_group_holds_more_tokens_than_an_engine_unless_kv_replicates(
    server: Compared, case: Case
) -> None:
    told = server.status()["capacity_tokens"]
    capacity = [told[str(degree)] for degree in server.degrees]
    assert capacity == sorted(capacity)
    assert (capacity[-1] == capacity[0]) == case.replicates


def test_each_degree_alone_gets_the_answers_of_stock(server: Compared) -> None:
    for degree in server.degrees[::-1]:
        for request in REQUESTS:
            compare(server, request, degree, run(server, request, degree))
    server.check()


def test_storm_of_switches_in_all_modes_changes_no_answer(server: Compared) -> None:
    """Some requests stay at a degree. The others go wherever they are sent."""
    jobs = list(itertools.product(REQUESTS, (None, *server.degrees)))
    asked: list[tuple[StockRequest, int | None, Future[Any]]] = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        for _, mode, groups in itertools.product(range(ROUNDS), MODES, LAYOUTS):
            if all(answer.done() for _, _, answer in asked):
                asked += [(*job, pool.submit(run, server, *job)) for job in jobs]
            server.layout(groups, mode)
        for request, degree, answer in asked:
            compare(server, request, degree or server.degrees[0], answer.result())
    assert {switch["mode"] for switch in server.switches()} == set(MODES)
    server.check()


def test_requests_migrate_with_their_kv(server: Compared) -> None:
    server.layout(APART)
    before = migrations(server)["migrated_tokens"]
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = [pool.submit(run, server, request, None) for request in REQUESTS]
        wait_until(lambda: server.requests("running") == len(REQUESTS), server.status)
        server.layout(ALL, "migrate")
        for request, answer in zip(REQUESTS, answers, strict=True):
            compare(server, request, server.degrees[0], answer.result())
    assert migrations(server)["migrated_tokens"] > before


def test_loss_of_an_engine_changes_no_answer(server: Compared) -> None:
    server.layout(PAIRS)
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = [pool.submit(run, server, request, 2) for request in REQUESTS]
        wait_until(lambda: server.requests("running") == len(REQUESTS), server.status)
        kill(server, 1)
        for request, answer in zip(REQUESTS, answers, strict=True):
            compare(server, request, 2, answer.result())
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    server.check()
