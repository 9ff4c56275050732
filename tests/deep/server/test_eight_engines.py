"""Eight engines in one server, the most that there may be: each degree up to eight answers what
stock vLLM answers.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deep.server.test_same_results import BETWEEN_S, Compared, compare, migrations, run
from tests.stock.requests import FORCED, SAMPLED

pytestmark = pytest.mark.server

DEGREES = (1, 2, 4, 8)
LAYOUTS = (
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[0, 1, 2, 3], [4, 5], [6], [7]],
    [[0, 1], [2, 3], [4, 5], [6, 7]],
    [[engine] for engine in range(8)],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Compared]:
    with Compared("llama", 8, 1) as live:
        yield live


def test_each_degree_up_to_eight_answers_as_stock_does(server: Compared) -> None:
    for degree in DEGREES:
        compare(server, SAMPLED[0], degree, run(server, SAMPLED[0], degree))
    server.check()


def test_streams_go_on_while_eight_engines_merge_and_split(server: Compared) -> None:
    """Some move with their KV at each switch, and one of each degree stays in its group."""
    free, fixed = (*SAMPLED, *FORCED), [(SAMPLED[0], degree) for degree in DEGREES]
    layouts, switched = itertools.cycle(LAYOUTS), 0
    with ThreadPoolExecutor(len(free) + len(fixed)) as pool:
        migrating = [pool.submit(run, server, request, None) for request in free]
        staying = [pool.submit(run, server, request, degree) for request, degree in fixed]
        while switched < len(LAYOUTS) or not all(answer.done() for answer in migrating):
            server.layout(next(layouts), "migrate")
            switched += 1
            time.sleep(BETWEEN_S)
        for request, answer in zip(free, migrating, strict=True):
            compare(server, request, 1, answer.result())
        for (request, degree), answer in zip(fixed, staying, strict=True):
            compare(server, request, degree, answer.result())
    assert migrations(server)["migrated"] > 0
    server.check()
