"""Calls of engines: sent at once, answered by type, and heard of when they fail."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flying_serving.wire import SwitchAnswer
from tests.with_vllm.server.doubles import PAIRS, UTILITY, Server


async def test_a_call_is_on_its_way_before_it_is_awaited() -> None:
    server = Server()
    call = server.calls.utility(2, "flying_switch")
    assert server.messages == [(UTILITY, "flying_switch", 2)]
    server.sent()
    assert (await call) == SwitchAnswer(1.0, 0.1, 0.1)


async def test_an_answer_of_another_type_is_an_error() -> None:
    server = Server()
    call = asyncio.ensure_future(server.calls.utility(2, "flying_switch"))
    (answer,) = server.vllm.utility_results.values()
    answer.set_result({"in_flight_ms": "soon"})
    server.sent()
    with pytest.raises(msgspec.ValidationError, match="in_flight_ms"):
        await asyncio.wait_for(call, 5)


async def test_exception_in_a_task_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock or a switch that died unheard would leave requests waiting: who reads vLLM's outputs
    hears of it.
    """
    server = Server()

    def fail(*_: Any) -> None:
        raise ValueError("injected")

    monkeypatch.setattr(server.controller, "acknowledged", fail)
    task = await server.switch(PAIRS, "weave")
    server.sent()
    with pytest.raises(ValueError, match="injected"):
        await server.read()
    assert not server.calls.tasks
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_cannot_be_sent_awaits_no_answer() -> None:
    server = Server()
    server.vllm.unsendable = {"flying_report"}
    with pytest.raises(ValueError, match="injected"):
        server.calls.utility(0, "flying_report")
    assert server.vllm.utility_results == {}


@pytest.mark.parametrize("ending", [False, True])
async def test_unsent_message_to_engines_is_logged(
    ending: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And not raised. When the server ends it is no news."""
    server = Server()
    server.calls.ending = ending
    server.vllm.unsendable = {"flying_retain"}
    server.calls.tell(0, "flying_retain", ["a"])
    server.calls.tell(1, "flying_check")
    assert server.messages == [(UTILITY, "flying_check", 1)]
    assert ("injected" in caplog.text) is not ending
    await asyncio.sleep(0)
    server.sent()
    await asyncio.wait(server.calls.tasks, timeout=5)
    assert not server.calls.tasks
