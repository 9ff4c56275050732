"""Calls of engines: none is kept that has ended, and an answer that comes later disturbs
nothing.
"""

import asyncio

import pytest
from vllm.v1.engine import UtilityOutput, core_client
from vllm.v1.serial_utils import UtilityResult

from flying_serving.errors import EngineLost
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table
from tests.with_vllm.server.doubles import Server


async def ended(server: Server) -> None:
    """Let what ends a call run to its end."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_calls_to_a_lost_engine_are_not_kept() -> None:
    server = Server()
    asked = [asyncio.ensure_future(server.calls.utility(2, "flying_check")) for _ in range(3)]
    kept = asyncio.ensure_future(server.calls.utility(1, "flying_check"))
    await ended(server)
    assert len(server.vllm.utility_results) == 4
    server.lose(2)
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, EngineLost) for one in found)
    await ended(server)
    assert len(server.vllm.utility_results) == 1
    kept.cancel()
    await ended(server)
    assert server.vllm.utility_results == {}


async def test_a_call_without_an_answer_in_time_is_not_kept() -> None:
    server = Server()
    with pytest.raises(EngineLost, match=r"engine 0 did not answer flying_check within 0\.01 s"):
        await server.calls.utility(0, "flying_check", timeout_s=0.01)
    await ended(server)
    assert server.vllm.utility_results == {}


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("failure", [None, "injected"])
async def test_late_answer_is_read_and_dropped(failure: str | None) -> None:
    """vLLM reads it, as it was on its way when the engine was lost."""
    server = Server()
    call = asyncio.ensure_future(server.calls.utility(3, "flying_check"))
    await ended(server)
    (number,) = server.vllm.utility_results
    server.lose(3)
    with pytest.raises(EngineLost):
        await call
    await ended(server)
    installer.install(table.SERVER_PATCHES, HOOKS)
    answer = UtilityOutput(number, failure_message=failure, result=UtilityResult(None))
    core_client._process_utility_output(answer, server.vllm.utility_results)
