"""The short form of `make fuzz`: some hundred requests that no client should send, and good ones beside them."""

import asyncio

import pytest

from tests.fuzz.bodies import draw_requests
from tests.fuzz.run import SETTINGS, end_is_clean, fuzz
from tests.live import Server, tiny

COUNT = 400


@pytest.mark.server
def test_fuzzed_requests_hurt_nobody() -> None:
    """No 5xx but where stock vLLM gives one; good requests beside them are right; nothing is left of any."""
    model = tiny("llama")
    with Server(model, 2, *SETTINGS) as server:
        found = asyncio.run(fuzz(server, draw_requests(COUNT, str(model), 1)))
        end_is_clean(server)
    assert not found.failures, found.report()
    assert not found.wrong, found.report()
    assert sum(found.statuses.values()) == COUNT
    assert found.statuses[200] > COUNT / 20, found.report()
