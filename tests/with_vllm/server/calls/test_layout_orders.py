"""An operator's orders: one that waits for requests to end can be cancelled, replaced, or left by
its client.
"""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import EngineLost, OrderDropped, ServerEnds
from flying_serving.server.calls import layout_orders
from tests.with_vllm.server.doubles import ALL, APART, PAIRS, Server
from tests.with_vllm.server.engines.nodes import node


def running() -> Server:
    """Return a server with a request on an engine alone."""
    server = Server()
    server.open_request("a")
    server.messages.clear()
    return server


@pytest.mark.parametrize("mode", ["sequential", "soft"])
async def test_an_order_that_waits_is_cancelled(mode: str) -> None:
    """Requests that it held back begin in the layout that is."""
    server = running()
    order = await server.switch(PAIRS, mode, rounds=3)
    server.open_request("b")
    dropped = server.orders.drop(OrderDropped("the order was cancelled"))
    assert dropped is not None and dropped.problem == "the order was cancelled"
    with pytest.raises(OrderDropped, match=r"^the order was cancelled$"):
        await asyncio.wait_for(order, 5)
    assert server.orders.drop(OrderDropped("again")) is None
    assert server.told() == []
    assert server.controller.state.running == 2
    assert server.controller.state.layout.to_lists() == APART


@pytest.mark.parametrize("mode", ["sequential", "soft"])
async def test_an_order_waits_for_no_request_that_is_paused(mode: str) -> None:
    """After a hard switch engines hear of it, once; after another, or if nothing is waited for,
    they need not.
    """
    server = running()
    for groups, told in ((PAIRS, [0, 1, 2, 3]), (APART, [])):
        hard = await server.switch(groups, "hard" if told else "weave", rounds=3)
        await server.settle()
        await asyncio.wait_for(hard, 5)
        waits = await server.switch(ALL, mode, rounds=3)
        assert server.told("flying_weave") == told
        server.messages.clear()
        server.orders.drop(OrderDropped("the order was cancelled"))
        await asyncio.wait([waits], timeout=5)


@pytest.mark.parametrize("mode", ["weave", "sequential"])
async def test_a_later_order_replaces_one_that_waits(mode: str) -> None:
    """At once; also one that has waited for its turn in between."""
    server = running()
    orders = [await server.switch(PAIRS, "sequential", rounds=3)]
    orders += [await server.switch(groups, "sequential", rounds=3) for groups in (ALL, PAIRS)]
    last = await server.switch(ALL, mode, rounds=3)
    for order in orders:
        with pytest.raises(OrderDropped, match=r"^a later order has replaced this one$"):
            await asyncio.wait_for(order, 5)
    if mode == "sequential":
        assert server.told() == []
        await server.outputs("a", [1], over=True)
    server.sent()
    made = await asyncio.wait_for(last, 5)
    assert made.new.to_lists() == server.controller.state.layout.to_lists() == ALL
    assert server.told() == [0, 1, 2, 3]


async def test_orders_that_come_while_one_waits_for_its_turn_replace_it() -> None:
    """The first is with the engines, so the second waits for their answers; then the third
    counts.
    """
    server = running()
    first = await server.switch(PAIRS, "weave", rounds=3)
    assert server.told() == [0, 1, 2, 3]
    tasks = [
        asyncio.get_running_loop().create_task(server.orders.switch(g, "sequential"))
        for g in (ALL, APART)
    ]
    server.sent()
    await asyncio.wait_for(first, 5)
    with pytest.raises(OrderDropped):
        await asyncio.wait_for(tasks[0], 5)
    await server.settle()
    assert (await asyncio.wait_for(tasks[1], 5)).new.to_lists() == APART


async def test_the_order_of_a_client_that_has_left_is_dropped() -> None:
    """While it waits for requests to end, or for its turn; what engines know of is done."""
    server = running()
    first = await server.switch(PAIRS, "sequential", rounds=3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not server.controller.changeover.is_under_way
    assert server.controller.state.switches.kept[-1].problem == "the client of the order has left"
    second = asyncio.get_running_loop().create_task(server.orders.switch(PAIRS, "weave"))
    await asyncio.sleep(0)
    third = await server.switch(ALL, "weave", rounds=3)
    for task in (second, third):
        task.cancel()
    server.sent()
    await asyncio.wait([second, third], timeout=5)
    await server.settle()
    assert server.controller.state.layout.to_lists() in (PAIRS, ALL)
    assert not server.controller.changeover.is_under_way


@pytest.mark.parametrize("answered", [True, False], ids=["made", "failed"])
async def test_once_engines_are_told_an_order_needs_no_client(answered: bool) -> None:
    """It comes to its end, and the next one waits for that."""
    server = running()
    first = await server.switch(PAIRS, "weave")
    assert server.told() == [0, 1, 2, 3]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.get_running_loop().create_task(server.orders.switch(ALL, "weave"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert server.told() == [0, 1, 2, 3]
    assert server.controller.state.layout.to_lists() == PAIRS
    if not answered:
        next(a for a in server.vllm.utility_results.values() if not a.done()).set_exception(
            EngineLost("injected")
        )
    await server.settle()
    assert (
        (await asyncio.wait_for(second, 5)).new.to_lists()
        == server.controller.state.layout.to_lists()
        == ALL
    )
    assert server.told() == [0, 1, 2, 3] * 2
    assert [made.problem for made in server.controller.state.switches.kept] == [
        None if answered else "injected",
        None,
    ]


@pytest.mark.parametrize(("ending", "error"), [(True, ServerEnds), (False, EngineDeadError)])
async def test_no_order_waits_for_engines_that_are_gone(
    ending: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the one that they were told of, nor the one behind it."""
    monkeypatch.setattr(layout_orders, "ALIVE_POLL_S", 0.01)
    server = running()
    first, second = await server.switch(PAIRS, "weave"), await server.switch(ALL, "weave")
    server.calls.ending, server.vllm.resources.engine_dead = ending, True
    for order in (first, second):
        with pytest.raises(error):
            await asyncio.wait_for(order, 5)


@pytest.mark.deep
async def test_an_unsent_request_after_a_dropped_order_is_no_unhandled_error() -> None:
    server = running()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    order = await server.switch(PAIRS, "sequential", rounds=3)
    server.open_request("b")
    server.orders.drop(OrderDropped("the order was cancelled"))
    server.vllm.sends[-1].set_exception(OSError("injected"))
    with pytest.raises(OrderDropped):
        await asyncio.wait_for(order, 5)
    await asyncio.sleep(0.01)
    gc.collect()
    assert problems == []


async def test_no_order_begins_when_the_server_ends() -> None:
    server = running()
    server.calls.ending = True
    with pytest.raises(ServerEnds, match=r"^the server is shutting down$"):
        await server.orders.switch(PAIRS)
    assert server.told() == []


async def test_an_engine_that_returns_as_others_are_told_is_not_waited_for(tmp_path: Path) -> None:
    """It is in the layout, alone, but the order did not go to it."""
    async with node(tmp_path) as one:
        server = one.server
        await one.lose(3)
        await one.rejoin(3)
        server.messages.clear()
        order = asyncio.ensure_future(server.orders.switch([[0, 1], [2]], "migrate"))
        server.sent()  # all engines have heard that it is there
        await asyncio.sleep(0)
        await one.until(lambda: not server.controller.state.absent_engines)
        await server.settle()
        await asyncio.wait_for(order, 5)
        assert server.told() == [0, 1, 2]
        assert server.controller.state.layout.to_lists() == [[0, 1], [2], [3]]
        assert not server.controller.changeover.is_under_way


async def test_an_order_waits_for_a_layout_that_is_made_again(tmp_path: Path) -> None:
    """By nobody's order, as an engine is back."""
    async with node(tmp_path) as one:
        one.vllm.stopped = {0, 1, 2, 3}
        server = one.server
        first = await server.switch(PAIRS, "weave")
        await server.settle()
        await asyncio.wait_for(first, 5)
        await one.lose(1)
        await one.rejoin(1)
        server.messages.clear()
        server.sent()  # all engines have heard that it is there
        await one.until(lambda: not server.controller.state.absent_engines)
        assert server.controller.changeover.is_under_way and server.told() == [0, 1, 2, 3]
        order = await server.switch(APART, "weave")
        assert not order.done()
        await server.settle()
        assert (
            (await asyncio.wait_for(order, 5)).new.to_lists()
            == server.controller.state.layout.to_lists()
            == APART
        )
        assert [made.new.to_lists() for made in server.controller.state.switches.kept] == [
            PAIRS,
            PAIRS,
            APART,
        ]
