"""The shell: commands of the controller are carried out before anything else can happen."""

from __future__ import annotations

import asyncio
import gc
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import SchedulerStats

from flying_serving.controller.commands import Recall, Reject
from flying_serving.layout.groups import KVSource, Layout
from flying_serving.vllm_adapter.keys import MIGRATED_FROM_KEY, OFFER_KEY
from flying_serving.vllm_adapter.scheduler.failures import failures
from tests.with_vllm.server.doubles import ABORT, ADD, APART, PAIRS, UTILITY, Server
from tests.with_vllm.server.engines.nodes import node


async def test_a_request_migrates_with_its_tokens_until_the_engines_answered() -> None:
    """Then at once, and all engines are told that they may go on behind it."""
    server = Server()
    server.open_request("a")
    assert server.messages == [(ADD, "a", 0)]
    assert await server.outputs("a", [7]) == ["a"]
    server.messages.clear()
    task = await server.switch(PAIRS, "migrate")
    assert server.messages == [(UTILITY, "flying_switch", engine) for engine in range(4)]
    server.messages.clear()
    assert await server.outputs("a", [8]) == ["a"]
    await asyncio.wait_for(task, 5)
    assert server.messages[:4] == [(UTILITY, "flying_retain", engine) for engine in range(4)]
    assert server.messages[4] == (ABORT, "a", 0)
    assert server.messages[5:] == [(ADD, "a+1", 0)]
    assert server.vllm.histories["a+1"] == [7, 8]
    assert await server.outputs("a", [9], over=True) == []
    assert await server.outputs("a+1", [9], over=True) == ["a"]
    assert server.controller.state.running == 0


async def test_statistics_of_a_lost_engine_are_those_of_an_idle_one(tmp_path: Path) -> None:
    """Also what was on its way: vLLM would show its requests for ever. Those of another are as they
    were sent.
    """
    async with node(tmp_path) as one:
        server = one.server
        await one.lose(2)
        idle = await server.read()
        assert idle.engine_index == 2
        assert idle.scheduler_stats.num_running_reqs == 0
        for engine, running in ((2, 0), (1, 5)):
            delayed = EngineCoreOutputs(
                engine_index=engine, scheduler_stats=SchedulerStats(num_running_reqs=5)
            )
            server.calls.mark_idle_if_lost(delayed)
            await server.shell.take_outputs(delayed)
            assert delayed.scheduler_stats is not None
            assert delayed.scheduler_stats.num_running_reqs == running


async def test_a_layout_is_ordered_of_the_engines_that_it_has(tmp_path: Path) -> None:
    """One that answers again, and has not joined the layout, is told later."""
    async with node(tmp_path) as one:
        await one.lose(2)
        await one.rejoin(2)
        one.server.messages.clear()
        order = await one.server.switch([[0, 1], [3]], "weave")
        assert one.server.told() == [0, 1, 3]
        await one.server.settle()
        await asyncio.wait_for(order, 5)


async def test_leaders_hear_of_all_that_leave_them_in_one_message() -> None:
    """Behind the answers to the order, before any of them goes on, and also those that none
    leaves.
    """
    server = Server()
    server.measured()
    for name in "abc":
        server.open_request(name, prompt_tokens=60 if name == "b" else 10)
        assert await server.outputs(name, [7]) == [name]
    task = await server.switch(PAIRS, "migrate")
    where = {name: server.controller.state.group_of(name) for name in "abc"}
    server.messages.clear()
    server.sent()
    await asyncio.wait_for(task, 5)
    assert server.messages[:4] == [(UTILITY, "flying_retain", engine) for engine in range(4)]
    assert [kind for kind, _, _ in server.messages[4:]] == [ADD] * 3
    retained = dict(server.vllm.retained)
    for name, group in where.items():
        assert group is not None
        ((engine_id, number),) = [one for one in retained[group[0]] if one[0] == name]
        assert engine_id == name
        assert server.vllm.extras[f"{name}+1"][MIGRATED_FROM_KEY] == (group[0], 1, number)
    assert sum(map(len, retained.values())) == 3


async def test_the_end_of_a_request_during_a_switch_migrates_no_other_twice() -> None:
    """Groups take fewer requests than engines: some of those recalled wait, and go on as others
    end.
    """
    server = Server()
    names = [f"r{number}" for number in range(16)]
    for name in names:
        server.open_request(name)
    task = await server.switch(PAIRS, "migrate")
    left = {name: server.streams.engine_id(name) for name in names}
    assert await server.outputs(left["r0"], [1], over=True) == ["r0"]
    for name in names:
        for _ in range(3):  # it may migrate, or begin, as others end
            if server.controller.state.group_of(name) is not None:
                await server.outputs(server.streams.engine_id(name), [1], over=True)
    await asyncio.wait_for(task, 5)
    assert server.controller.state.running == 0
    assert not len(server.controller.state.pool)
    where: dict[str, int] = {}
    for kind, what, engine in server.messages:
        if kind is ADD:
            assert what not in where
            where[what] = engine
        if kind is ABORT:
            assert where[what] == engine


async def test_a_client_that_leaves_cancels_no_message_of_others() -> None:
    server = Server()
    server.open_request("a")
    aborting = asyncio.get_running_loop().create_task(server.shell.abort(["a"]))
    await asyncio.sleep(0)
    server.open_request("b")
    waiting = asyncio.ensure_future(server.shell.carry_out([]))
    aborting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    await asyncio.wait_for(waiting, 5)
    assert server.messages == [(ADD, "a", 0), (ABORT, "a", 0), (ADD, "b", 0)]
    assert server.controller.state.running == 1


async def test_a_request_that_cannot_be_sent_ends_alone() -> None:
    """All that wait are dispatched by one event, the end of another: its outputs and those behind
    it come through.
    """
    server = Server()
    names = [f"r{number}" for number in range(8)]
    server.open_request("first")
    task = await server.switch(PAIRS, "sequential")
    for name in names:
        server.open_request(name)
    assert server.messages == [(ADD, "first", 0)]
    server.vllm.unsendable = {"r0", "r5"}
    assert await server.outputs("first", [1], over=True) == ["first"]
    await asyncio.wait_for(task, 5)
    begun = [what for kind, what, _ in server.messages if kind is ADD]
    assert begun == ["first", "r1", "r2", "r3", "r4", "r6", "r7"]
    ended = [await server.read() for _ in server.vllm.unsendable]
    assert {(o.request_id, o.finish_reason) for one in ended for o in one.outputs} == {
        ("r0", FinishReason.ERROR),
        ("r5", FinishReason.ERROR),
    }
    assert server.controller.state.running == 6
    assert not len(server.controller.state.pool)


async def test_a_request_that_fails_stops_no_other_command() -> None:
    """Commands to begin it, of an order and to begin it anew in that layout come together: it ends,
    others go on.
    """
    server = Server(capped=False)
    commands = [
        command for number in range(8) for command in server.arrived(f"r{number}", prompt_tokens=70)
    ]
    made, ordered = server.controller.begin_switch(
        Layout.parse(PAIRS, 4, (1, 2, 4)), "weave", None, 0.0
    )
    recalled = [command.request_id for command in ordered if isinstance(command, Recall)]
    assert len(recalled) == 4
    server.vllm.unsendable = {recalled[0]}
    server.shell.carry_out(commands + ordered)
    assert [what for _, what, _ in server.messages].count("flying_switch") == 4
    assert [what for kind, what, _ in server.messages if kind is ABORT] == recalled[1:]
    for name in recalled[1:]:
        assert server.streams.engine_id(name) == f"{name}+1"
    ended = await server.read()
    assert [(o.request_id, o.finish_reason) for o in ended.outputs] == [
        (recalled[0], FinishReason.ERROR)
    ]
    assert server.vllm.outputs_queue.empty()
    assert server.controller.state.running == 7
    await server.settle(3)
    assert made.problem is None
    assert not server.controller.changeover.is_under_way


async def test_an_order_that_cannot_be_sent_fails_alone() -> None:
    """Who ordered it hears why; what was said with it is done, and the next order begins."""
    server = Server(capped=False)
    for number in range(8):
        server.open_request(f"r{number}", prompt_tokens=70)
    server.vllm.unsendable = {"flying_switch"}
    ordering = await server.switch(PAIRS, "weave")
    server.sent()
    with pytest.raises(ValueError, match="injected"):
        await asyncio.wait_for(ordering, 5)
    assert server.controller.state.switches.kept[-1].problem == "injected"
    assert [kind for kind, _, _ in server.messages].count(ABORT) == 4
    server.vllm.unsendable = set()
    task = await server.switch(APART, "weave")
    await asyncio.sleep(0)
    server.sent()
    assert (await asyncio.wait_for(task, 5)).problem is None


async def test_dead_engines_stop_no_command_that_needs_none() -> None:
    """That needs none of them; who gave the commands hears of it then."""
    server = Server()
    commands = server.arrived("a")
    server.open_request("late")
    (queue,) = server.processed("late")
    server.vllm.resources.engine_dead = True
    with pytest.raises(EngineDeadError):
        server.shell.carry_out([*commands, Reject("late", 1.0)])
    assert "longer than its queue_deadline_s" in str(refusal_in(queue))


def refusal_in(queue: RequestOutputCollector) -> GracefulHTTPError:
    """Return what a client gets in place of an answer."""
    with pytest.raises(InputStreamError) as caught:
        queue.get_nowait()
    assert isinstance(caught.value.cause, GracefulHTTPError)
    return caught.value.cause


async def test_a_request_that_its_engine_fails_ends_with_the_engines_words() -> None:
    server = Server()
    server.open_request("a")
    server.open_request("b")
    await server.outputs("b", [7])
    (queue,) = server.processed("a")
    (outputs,) = failures([SimpleNamespace(request_id="a", client_index=0)], "in words").values()
    await server.shell.take_outputs(outputs)
    assert outputs.outputs == []
    refusal = refusal_in(queue)
    assert refusal.message == "in words"
    assert refusal.http_status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert list(server.controller.state.open_requests) == ["b"]


async def test_a_late_request_is_answered_and_leaves_the_queue_of_its_engine() -> None:
    """What the engine says of it later is stale."""
    server = Server(capped=False)
    server.open_request("a", queue_deadline_s=1.0)
    (queue,) = server.processed("a")
    server.shell.carry_out(server.controller.tick(1.5))
    assert refusal_in(queue).http_status == HTTPStatus.GATEWAY_TIMEOUT
    assert server.messages == [(ADD, "a", 0), (ABORT, "a", 0)]
    assert await server.outputs("a", [7]) == []
    assert server.controller.state.open_requests == []


@pytest.mark.parametrize("says", ["begun", "token", "other", "begun before it left"])
async def test_an_engine_says_that_a_request_has_begun(says: str) -> None:
    """It meets its deadline then, also if it has left that engine meanwhile. vLLM hears of tokens
    only.
    """
    server = Server(capped=False)
    server.open_request("a", queue_deadline_s=1.0)
    (queue,) = server.processed("a")
    if says == "begun before it left":
        await asyncio.wait_for(await server.switch(PAIRS, "migrate", 10), 5)
    name = "b" if says == "other" else "a"
    assert await server.outputs(name, [7] if says == "token" else []) == (
        ["a"] if says == "token" else []
    )
    server.shell.carry_out(server.controller.tick(1.5))
    if says != "other":
        assert server.controller.state.open_requests == ["a"]
    else:
        assert refusal_in(queue).http_status == HTTPStatus.GATEWAY_TIMEOUT


async def test_engines_know_the_deadline_of_a_request_and_of_its_prefix() -> None:
    """So they tell when either begins, which meets the deadline."""
    server = Server()
    server.measured()
    server.open_request("a", prompt_tokens=40, queue_deadline_s=1.0, split_at=20)
    prefix, whole = (name for kind, name, _ in server.messages if kind is ADD)
    assert (
        server.vllm.extras[prefix]["queue_deadline_s"]
        == server.vllm.extras[whole]["queue_deadline_s"]
        == 1.0
    )
    assert await server.outputs(prefix, []) == []
    assert server.controller.tick(1.5) == []


@pytest.mark.deep
async def test_an_unsent_abort_of_a_client_that_left_is_no_unhandled_error() -> None:
    """Its client has left meanwhile."""
    server = Server()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    server.open_request("a")
    aborting = asyncio.get_running_loop().create_task(server.shell.abort(["a"]))
    await asyncio.sleep(0)
    assert server.messages == [(ADD, "a", 0), (ABORT, "a", 0)]
    aborting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    server.vllm.sends[-1].set_exception(OSError("injected"))
    await asyncio.sleep(0.01)
    gc.collect()
    assert problems == []


async def test_an_unsent_abort_raises_where_it_is_awaited() -> None:
    server = Server()
    server.open_request("a")
    aborting = asyncio.get_running_loop().create_task(server.shell.abort(["a"]))
    await asyncio.sleep(0)
    server.vllm.sends[-1].set_exception(OSError("injected"))
    with pytest.raises(OSError, match="injected"):
        await asyncio.wait_for(aborting, 5)


async def test_a_recalled_request_whose_group_is_full_waits_on() -> None:
    """Its output was on the way when another decision took it back into the pool."""
    server = Server()
    server.arrived("a")
    server.controller.finished(["a"], 0.0, aborted=True)
    assert server.controller.state.group_of("a") is None
    assert server.controller.group_full("a", 0.0) == []


async def test_a_request_that_ends_as_its_group_is_full_leaves_no_kv_there() -> None:
    """Its group has kept it for another to go on with: it is told that none does."""
    server = Server()
    server.measured()
    server.open_request("a", output_tokens=390)
    assert OFFER_KEY in server.vllm.extras["a"]
    server.messages.clear()
    room = server.controller.settings.capacity.kv_tokens[1] - 10
    assert await server.outputs("a", [7] * room, over=True, reason=FinishReason.LENGTH) == ["a"]
    assert server.messages == [(ABORT, "a", 0)]
    assert server.controller.state.running == 0


async def test_a_client_that_leaves_while_its_request_waits_leaves_no_kv() -> None:
    """The group that has the KV is told, which is not where a request runs."""
    server = Server()
    server.open_request("a")
    state = server.controller.state.started["a"]
    server.shell.carry_out([server.controller.bookings.requeue(state, 0.0, KVSource((0,), 5))])
    assert server.told("flying_retain") == [0]
    server.messages.clear()
    task = asyncio.get_running_loop().create_task(server.shell.abort(["a"]))
    await asyncio.sleep(0)
    assert server.messages == [(ABORT, "a", 0)]
    server.sent()
    await asyncio.wait_for(task, 5)
