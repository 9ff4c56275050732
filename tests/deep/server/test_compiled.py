"""A compiled lane 1 answers what stock vLLM answers, and so do the eager lanes of groups beside it.

With packed weights a product is one operation of the compiled code. Others are compiled as they
are.
"""

from collections.abc import Iterator

import pytest

from harness.live import wait_until
from harness.losing import is_whole, kill
from tests.deep.server.test_same_results import Compared, compare, compare_all_degrees_at_once, run
from tests.deep.server.test_unpacked_weights import NOT_PACKED
from tests.stock.requests import REQUESTS

pytestmark = pytest.mark.server

BACK_S = 120.0
CASES = {"packed": ("llama", ""), "unpacked": ("qwen2", NOT_PACKED), "experts": ("mixtral", "")}


@pytest.fixture(scope="module", params=CASES)
def server(request: pytest.FixtureRequest) -> Iterator[Compared]:
    shape, preamble = CASES[request.param]
    with Compared(shape, 2, 1, "--no-enforce-eager", preamble=preamble) as live:
        yield live


def test_lane_1_is_compiled(server: Compared) -> None:
    assert server.log().count("lane 1: compiled steps equal eager steps within") == 2


def test_each_degree_gives_stocks_tokens(server: Compared) -> None:
    for degree in server.degrees:
        for request in REQUESTS:
            compare(server, request, degree, run(server, request, degree))
    server.check()


def test_all_degrees_give_stocks_tokens_while_the_layout_changes(server: Compared) -> None:
    compare_all_degrees_at_once(server)


@pytest.mark.parametrize("server", ["packed"], indirect=True)
def test_lost_engine_comes_back_compiled(server: Compared) -> None:
    kill(server, 1)
    wait_until(lambda: is_whole(server), server.log, BACK_S)
    assert server.log().count("lane 1: compiled steps equal eager steps within") == 3
    for degree in server.degrees:
        for request in REQUESTS[::2]:
            compare(server, request, degree, run(server, request, degree))
    server.check()
