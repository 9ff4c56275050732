"""Calls of engines: none is kept that has ended, and an answer that comes later disturbs
nothing.
"""

import asyncio
from pathlib import Path

import pytest
from vllm.v1.engine import UtilityOutput, core_client
from vllm.v1.serial_utils import UtilityResult

from flying_serving.errors import EngineLost
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table
from tests.with_vllm.server.doubles import Server
from tests.with_vllm.server.engines.nodes import node


async def ended(server: Server) -> None:
    """Let what ends a call run to its end."""
    for _ in range(3):
        await asyncio.sleep(0)


def checks(server: Server) -> list[int]:
    """The numbers of the calls of `flying_check` that are kept."""
    kept, methods = server.vllm.utility_results, server.vllm.methods
    return [number for number in kept if methods[number] == "flying_check"]


async def test_calls_to_a_lost_engine_are_not_kept(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        server = one.server
        one.vllm.stopped = {1, 2}
        asked = [asyncio.ensure_future(server.calls.utility(2, "flying_check")) for _ in range(3)]
        kept = asyncio.ensure_future(server.calls.utility(1, "flying_check"))
        await ended(server)
        assert len(checks(server)) == 4
        await one.lose(2)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, EngineLost) for answer in found)
        await ended(server)
        assert len(checks(server)) == 1
        kept.cancel()
        await ended(server)
        assert checks(server) == []


async def test_a_call_without_an_answer_in_time_is_not_kept() -> None:
    server = Server()
    with pytest.raises(EngineLost, match=r"engine 0 did not answer flying_check within 0\.01 s"):
        await server.calls.utility(0, "flying_check", timeout_s=0.01)
    await ended(server)
    assert server.vllm.utility_results == {}


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("failure", [None, "injected"])
async def test_late_answer_is_read_and_dropped(failure: str | None, tmp_path: Path) -> None:
    """vLLM reads it, as it was on its way when the engine was lost."""
    async with node(tmp_path) as one:
        server = one.server
        one.vllm.stopped = {3}
        call = asyncio.ensure_future(server.calls.utility(3, "flying_check"))
        await ended(server)
        (number,) = checks(server)
        await one.lose(3)
        with pytest.raises(EngineLost):
            await call
        await ended(server)
        installer.install(table.SERVER_PATCHES, HOOKS)
        answer = UtilityOutput(number, failure_message=failure, result=UtilityResult(None))
        core_client._process_utility_output(answer, server.vllm.utility_results)
