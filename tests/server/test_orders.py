"""An operator's orders: one that waits for requests to end can be cancelled, replaced, or left by its client."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import EngineLost, OrderDropped, ServerEnds
from flying_serving.server import orders
from tests.server.test_client import APART, PAIRS, UTILITY, Client, switch

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


@pytest.mark.parametrize("mode", ["sequential", "soft"])
async def test_an_order_that_waits_is_cancelled(mode: str) -> None:
    """Requests that it held back begin in the layout that is."""
    client = running()
    order = await begun(client, client.switch(PAIRS, mode))
    client.open_request("b")
    dropped = client.drop_order(OrderDropped("the order was cancelled"))
    assert dropped is not None and dropped.problem == "the order was cancelled"
    with pytest.raises(OrderDropped, match=r"^the order was cancelled$"):
        await asyncio.wait_for(order, 5)
    assert client.drop_order(OrderDropped("again")) is None
    assert told(client) == []
    assert client.controller.running == 2
    assert client.controller.layout.to_lists() == APART


@pytest.mark.parametrize("mode", ["weave", "sequential"])
async def test_a_later_order_replaces_one_that_waits(mode: str) -> None:
    """At once; also one that has waited for its turn in between."""
    client = running()
    orders = [await begun(client, client.switch(PAIRS, "sequential"))]
    orders += [await begun(client, client.switch(groups, "sequential")) for groups in (ALL, PAIRS)]
    last = await begun(client, client.switch(ALL, mode))
    for order in orders:
        with pytest.raises(OrderDropped, match=r"^a later order has replaced this one$"):
            await asyncio.wait_for(order, 5)
    if mode == "sequential":
        assert told(client) == []
        await client.outputs("a", [1], over=True)
    client.sent()
    made = await asyncio.wait_for(last, 5)
    assert made.new.to_lists() == client.controller.layout.to_lists() == ALL
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


@pytest.mark.parametrize("answered", [True, False], ids=["made", "failed"])
async def test_once_engines_are_told_an_order_needs_no_client(answered: bool) -> None:
    """It comes to its end, and the next one waits for that."""
    client = running()
    first = await switch(client, PAIRS, "weave")
    assert told(client) == [0, 1, 2, 3]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.get_running_loop().create_task(client.switch(ALL, "weave"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert told(client) == [0, 1, 2, 3]
    assert client.controller.layout.to_lists() == PAIRS
    if not answered:
        next(a for a in client.utility_results.values() if not a.done()).set_exception(EngineLost("planted"))
    for _ in range(10):
        client.sent()
        await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(second, 5)).new.to_lists() == client.controller.layout.to_lists() == ALL
    assert told(client) == [0, 1, 2, 3] * 2
    assert [made.problem for made in client.controller.switches.kept] == [None if answered else "planted", None]


@pytest.mark.parametrize(("ending", "error"), [(True, ServerEnds), (False, EngineDeadError)])
async def test_no_order_waits_for_engines_that_are_gone(
    ending: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one that they were told of, nor the one behind it."""
    monkeypatch.setattr(orders, "LOOK_S", 0.01)
    client = running()
    first, second = await switch(client, PAIRS, "weave"), await switch(client, ALL, "weave")
    client.ending, client.resources = ending, SimpleNamespace(engine_dead=True)
    for order in (first, second):
        with pytest.raises(error):
            await asyncio.wait_for(order, 5)


async def test_nobody_has_to_hear_that_what_a_dropped_order_held_back_was_not_sent() -> None:
    client = running()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    order = await begun(client, client.switch(PAIRS, "sequential"))
    client.open_request("b")
    client.drop_order(OrderDropped("the order was cancelled"))
    client.sends[-1].set_exception(OSError("planted"))
    with pytest.raises(OrderDropped):
        await asyncio.wait_for(order, 5)
    await asyncio.sleep(0.01)
    gc.collect()
    assert problems == []


async def test_no_order_begins_when_the_server_ends() -> None:
    client = running()
    client.ending = True
    with pytest.raises(ServerEnds, match=r"^the server is shutting down$"):
        await client.switch(PAIRS)
    assert told(client) == []
