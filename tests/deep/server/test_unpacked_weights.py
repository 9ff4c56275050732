"""Lanes over weights that are not packed answer what stock vLLM answers, degree 1 included.

CUDA has them so, and CPUs without a product for the type. Here no type has one.
"""

from collections.abc import Iterator

import pytest

from tests.deep.server.test_same_results import Compared, compare, compare_all_degrees_at_once, run
from tests.stock.requests import REQUESTS

pytestmark = [
    pytest.mark.server,
    pytest.mark.cpu_only("no weight is packed there: test_same_results.py has it"),
]

SHAPES = ("llama", "qwen2", "llama-mqa", "mixtral")
NOT_PACKED = """
from flying_serving.vllm_adapter import loading
from flying_serving.worker.binding import share
loading.packing = lambda dtype: None
share.PackedColumns = share.PackedRows = None  # so that a packed weight ends the start
"""


@pytest.fixture(scope="module", params=SHAPES)
def server(request: pytest.FixtureRequest) -> Iterator[Compared]:
    with Compared(request.param, 4, 1, preamble=NOT_PACKED) as live:
        yield live


def test_each_degree_gives_stocks_tokens(server: Compared) -> None:
    for degree in server.degrees:
        for request in REQUESTS:
            compare(server, request, degree, run(server, request, degree))
    server.check()


def test_all_degrees_give_stocks_tokens_while_the_layout_changes(server: Compared) -> None:
    compare_all_degrees_at_once(server)
