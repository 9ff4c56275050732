"""An engine dies under streaming requests: none is lost, and the engine comes back."""

import asyncio

import pytest

from harness.live import Server, wait_until
from harness.losing import is_whole, kill
from tests.smoke.four_requests import answers_as_stock, streams_answer_as_stock

pytestmark = pytest.mark.server

PAIRS, TOGETHER = [[0, 1], [2, 3]], [[0, 1, 2, 3]]
BACK_S = 90.0


async def test_no_request_is_lost_with_an_engine(four: Server) -> None:
    """Those of its group go on elsewhere, where they were. Then the layout is made again, and
    the engine serves.
    """
    before = four.status()["orphaned_requests"]
    four.layout(PAIRS)
    async with streams_answer_as_stock(four):
        await asyncio.to_thread(kill, four, 1)
    after = four.status()["orphaned_requests"]
    assert after["requeued"] > before["requeued"] and after["failed"] == before["failed"]

    wait_until(lambda: is_whole(four), four.log, BACK_S)
    wait_until(lambda: four.status()["layout"] == PAIRS, four.status)
    four.layout(TOGETHER)
    await answers_as_stock(four)
