"""An adapter is on every engine or on none; an engine that is lost meanwhile does not count."""

import asyncio
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from flying_serving.errors import EngineLost
from flying_serving.server.calls.adapters import add_everywhere
from tests.server.doubles import Server

ADAPTER = LoRARequest(lora_name="a", lora_int_id=3, lora_path="/an/adapter")


async def load(server: Server, *answers: Any) -> asyncio.Task[bool]:
    """Load an adapter; each engine answers. Returns the call, which may go on."""
    call = asyncio.ensure_future(add_everywhere(server.calls, ADAPTER))
    await _rounds()
    waiting = list(server.vllm.utility_results.values())
    for answer, given in zip(waiting, answers, strict=True):
        if isinstance(given, Exception):
            answer.set_exception(given)
        else:
            answer.set_result(given)
    server.sent()
    await _rounds()
    return call


async def _rounds() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_adapter_is_loaded_on_every_engine() -> None:
    server = Server()
    call = await load(server, True, True, True, True)
    assert await call is True
    assert server.told("add_lora") == [0, 1, 2, 3]
    assert server.told("remove_lora") == []


async def test_a_load_that_fails_on_one_engine_is_undone_on_all() -> None:
    server = Server()
    call = await load(server, True, True, ValueError("rank 16"), True)
    assert server.told("remove_lora") == [0, 1, 2, 3]
    server.sent()
    with pytest.raises(ValueError, match="rank 16"):
        await call


async def test_an_engine_that_is_lost_meanwhile_does_not_count() -> None:
    server = Server()
    call = await load(server, True, EngineLost("engine 1 has ended"), True, True)
    assert await call is True
    assert server.told("remove_lora") == []


async def test_a_load_that_no_engine_has_answered_fails() -> None:
    server = Server()
    call = await load(server, *[EngineLost(f"engine {engine} has ended") for engine in range(4)])
    with pytest.raises(EngineLost, match="engine 0"):
        await call
