"""Requests on their way in and out of the client, when what is to be sent of them cannot be."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.server.test_client import ABORT, ADD, Client


async def test_nobody_has_to_hear_that_an_abort_was_not_sent() -> None:
    """Its client has left meanwhile."""
    client = Client()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    client.open_request("a")
    aborting = asyncio.get_running_loop().create_task(client.abort_requests_async(["a"]))
    await asyncio.sleep(0)
    assert client.messages == [(ADD, "a", 0), (ABORT, "a", 0)]
    aborting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    client.sends[-1].set_exception(OSError("planted"))
    await asyncio.sleep(0.01)
    gc.collect()
    assert problems == []


async def test_who_aborts_a_request_hears_that_it_was_not_sent() -> None:
    client = Client()
    client.open_request("a")
    aborting = asyncio.get_running_loop().create_task(client.abort_requests_async(["a"]))
    await asyncio.sleep(0)
    client.sends[-1].set_exception(OSError("planted"))
    with pytest.raises(OSError, match="planted"):
        await asyncio.wait_for(aborting, 5)
