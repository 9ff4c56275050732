"""The server's clock: an engine that is slow to answer stops neither deadlines nor decisions nor
the other engines.
"""

import asyncio
import contextlib
from typing import Any

import pytest
from vllm.v1.engine.async_llm import InputStreamError

from flying_serving.server import clock
from tests.with_vllm.server.doubles import ANSWERS, UTILITY, FakeVllm, Server, request

SLOW = 1
TICK_S = 0.01


class Answering(FakeVllm):
    """Engines answer at once, but the slow one never answers one of the calls."""

    def __init__(self, silent: str) -> None:
        super().__init__()
        self.silent = silent

    def _send_input(self, kind: Any, content: Any, engine: bytes) -> asyncio.Future[None]:
        sent = super()._send_input(kind, content, engine)
        sent.set_result(None)
        if kind is UTILITY and (engine[0] != SLOW or content[2] != self.silent):
            answer = self.utility_results[content[1]]
            asyncio.get_running_loop().call_soon(answer.set_result, ANSWERS.get(content[2]))
        return sent


@pytest.mark.parametrize("silent", ["flying_steps", "flying_calibration"])
async def test_a_slow_engine_stops_no_deadline(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep the other engines from being measured; it is not asked again before it has
    answered.
    """
    monkeypatch.setattr(clock, "TICK_S", TICK_S)
    server = Server(vllm=Answering(silent))
    for number in range(16):
        server.open_request(f"r{number}")
    keeping = asyncio.get_running_loop().create_task(clock.keep_time(server.shell, None))
    if silent == "flying_steps":
        while server.told(silent).count(0) < 3:
            await asyncio.sleep(TICK_S)
        assert server.told(silent).count(SLOW) == 1
    await asyncio.wait_for(server.shell.add(request("overdue", queue_deadline_s=5 * TICK_S)), 10)
    (queue,) = server.processed("overdue")
    with pytest.raises(InputStreamError) as caught:
        await asyncio.wait_for(queue.get(), 10)
    assert "longer than its queue_deadline_s" in str(caught.value.cause)
    for task in (keeping, *server.calls.tasks):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
