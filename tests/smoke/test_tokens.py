"""Each layout answers what stock vLLM answers: the same tokens, with the same logprobs."""

import pytest

from flying_serving.layout.groups import Layout
from harness.live import Server
from tests.smoke.four_requests import answers_as_stock, compare
from tests.stock.recorded import stock_answers
from tests.stock.requests import SAMPLED

pytestmark = pytest.mark.server

each_degree = pytest.mark.parametrize(
    ("engines", "degree"),
    [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)],
    ids=["two-degree-1", "two-degree-2", "four-degree-1", "four-degree-2", "four-degree-4"],
)


def steps(server: Server) -> dict[tuple[str, ...], float]:
    """Steps that were made so far, by the size of their group."""
    return server.metric("flying:step_duration_seconds_count", "group_size")


@each_degree
async def test_answers_are_those_of_stock_on_one_device(
    servers: dict[int, Server], engines: int, degree: int
) -> None:
    """Greedy and seeded; groups of this degree alone have computed them."""
    server = servers[engines]
    server.layout(Layout.uniform(engines, degree).to_lists())
    before = steps(server)
    await answers_as_stock(server)
    after = steps(server)
    assert {size for size in after if after[size] > before[size]} == {(str(degree),)}


@each_degree
def test_seeded_answers_are_those_of_stock_at_that_degree(
    servers: dict[int, Server], engines: int, degree: int
) -> None:
    """Of stock vLLM with `--tensor-parallel-size`. A request may ask for its degree itself."""
    server = servers[engines]
    recorded = stock_answers("llama")[str(degree)]["answers"]
    for request in SAMPLED[:3]:
        answer = server.post(
            request.prompt, request.max_tokens, degree, seed=request.seed
        ).raise_for_status()
        choice, stock = answer.json()["choices"][0], recorded[request.name]
        found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        compare(found, (stock["tokens"], stock["logprobs"]))
