"""A node that drains: requests under way are counted until their answers are out, and then it may
be stopped.
"""

import asyncio

import pytest

from flying_serving.server.requests.draining import Draining


async def test_a_draining_node_is_not_ready_while_a_request_is_answered() -> None:
    draining = Draining()
    draining.begin()
    with draining.count_answer():
        assert draining.to_json(0) == {"draining": True, "ready_to_stop": False}


def test_a_draining_node_is_ready_when_no_request_is_left() -> None:
    draining = Draining()
    draining.begin()
    assert draining.to_json(0)["ready_to_stop"]


def test_a_draining_node_is_not_ready_while_the_controller_has_a_request() -> None:
    draining = Draining()
    draining.begin()
    assert not draining.to_json(1)["ready_to_stop"]


def test_a_node_that_does_not_drain_is_not_ready_to_stop() -> None:
    """It may get a request at any moment."""
    assert Draining().to_json(0) == {"draining": False, "ready_to_stop": False}


async def test_a_request_whose_client_leaves_is_not_counted_any_more() -> None:
    draining = Draining()

    async def answer() -> None:
        with draining.count_answer():
            await asyncio.sleep(60)

    answering = asyncio.ensure_future(answer())
    await asyncio.sleep(0)
    assert draining.answering == 1
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert draining.answering == 0
