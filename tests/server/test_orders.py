"""An operator's orders: one that waits for requests to end can be cancelled, replaced, or left by its client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from flying_serving.errors import OrderDropped, ServerEnds
from tests.server.test_client import APART, PAIRS, UTILITY, Client

ALL = [[0, 1, 2, 3]]


def running() -> Client:
    """Return a client with a request on an engine alone."""
    client = Client()
    client.open_request("a")
    client.messages.clear()
    return client


async def begun(client: Client, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin an order; what it can do at once is done when this returns."""
    task = asyncio.get_running_loop().create_task(work)
    for _ in range(3):
        client.sent()
        await asyncio.sleep(0)
    return task


def told(client: Client) -> list[int]:
    """Return the engines that have been told their group."""
    return [engine for kind, what, engine in client.messages if (kind, what) == (UTILITY, "flying_switch")]


@pytest.mark.parametrize("preempt", ["sequential", "soft"])
async def test_an_order_that_waits_is_cancelled(preempt: str) -> None:
    """Requests that it held back begin in the layout that is."""
    client = running()
    order = await begun(client, client.switch(PAIRS, preempt))
    client.open_request("b")
    switch = client.drop_order(OrderDropped("the order was cancelled"))
    assert switch is not None and switch.problem == "the order was cancelled"
    with pytest.raises(OrderDropped, match=r"^the order was cancelled$"):
        await asyncio.wait_for(order, 5)
    assert client.drop_order(OrderDropped("again")) is None
    assert told(client) == []
    assert client.controller.running == 2
    assert client.controller.layout.to_lists() == APART


@pytest.mark.parametrize("preempt", ["weave", "sequential"])
async def test_a_later_order_replaces_one_that_waits(preempt: str) -> None:
    """At once; also one that has waited for its turn in between."""
    client = running()
    orders = [await begun(client, client.switch(PAIRS, "sequential"))]
    orders += [await begun(client, client.switch(groups, "sequential")) for groups in (ALL, PAIRS)]
    last = await begun(client, client.switch(ALL, preempt))
    for order in orders:
        with pytest.raises(OrderDropped, match=r"^a later order has replaced this one$"):
            await asyncio.wait_for(order, 5)
    if preempt == "sequential":
        assert told(client) == []
        await client.outputs("a", [1], over=True)
    client.sent()
    switch = await asyncio.wait_for(last, 5)
    assert switch.new.to_lists() == client.controller.layout.to_lists() == ALL
    assert told(client) == [0, 1, 2, 3]


async def test_orders_that_come_while_one_waits_for_its_turn_replace_it() -> None:
    """The first is with the engines, so the second waits for their answers; then the third counts."""
    client = running()
    first = await begun(client, client.switch(PAIRS, "weave"))
    assert told(client) == [0, 1, 2, 3]
    tasks = [asyncio.get_running_loop().create_task(client.switch(g, "sequential")) for g in (ALL, APART)]
    client.sent()
    await asyncio.wait_for(first, 5)
    with pytest.raises(OrderDropped):
        await asyncio.wait_for(tasks[0], 5)
    for _ in range(10):
        client.sent()
        await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(tasks[1], 5)).new.to_lists() == APART


async def test_the_order_of_a_client_that_has_left_is_dropped() -> None:
    """While it waits for requests to end, or for its turn; what engines know of is done."""
    client = running()
    first = await begun(client, client.switch(PAIRS, "sequential"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not client.controller.changing
    assert client.controller.switches.kept[-1].problem == "who ordered it has left"
    second = asyncio.get_running_loop().create_task(client.switch(PAIRS, "weave"))
    await asyncio.sleep(0)
    third = await begun(client, client.switch(ALL, "weave"))
    for task in (second, third):
        task.cancel()
    client.sent()
    await asyncio.wait([second, third], timeout=5)
    for _ in range(10):
        client.sent()
        await asyncio.sleep(0.01)
    assert client.controller.layout.to_lists() in (PAIRS, ALL)
    assert not client.controller.changing


async def test_no_order_begins_when_the_server_ends() -> None:
    client = running()
    client.ending = True
    with pytest.raises(ServerEnds, match=r"^the server is shutting down$"):
        await client.switch(PAIRS)
    assert told(client) == []
