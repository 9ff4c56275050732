"""The clock of the client: an engine that is slow to answer stops neither deadlines nor decisions nor the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from flying_serving.controller.requests import RequestSpec
from flying_serving.server import clock
from tests.server.test_client import UTILITY, Client

SLOW = 1
TICK_S = 0.01


class Answering(Client):
    """A client whose engines answer at once, but for what the slow one never answers."""

    def __init__(self, silent: str) -> None:
        super().__init__()
        self.metrics = None
        self.silent = silent
        self.asked: list[int] = []

    def _send_input(self, request_type: Any, request: Any, engine: bytes | None = None) -> Any:
        sent = super()._send_input(request_type, request, engine)
        sent.set_result(None)
        if request_type is UTILITY:
            _, call_id, method, _ = request
            assert engine is not None
            if method == "flying_steps":
                self.asked.append(engine[0])
            if engine[0] != SLOW or method != self.silent:
                asyncio.get_running_loop().call_soon(self.utility_results[call_id].set_result, [])
        return sent

    async def wait(self, deadline_s: float) -> None:
        """A request waits in the pool, for at most so long."""
        params = SamplingParams(max_tokens=20)
        request = EngineCoreRequest("late", list(range(10)), None, params, None, 0.0, None, None, None)
        wanted = RequestSpec(10, 30, 20, deadline_s=deadline_s)
        self.streams.open(request)
        expires = self._deadlines["late"] = asyncio.get_running_loop().create_future()
        self.carry_out(self.controller.arrived("late", wanted, time.monotonic()))
        assert "late" in self.controller.pool
        await expires


@pytest.mark.parametrize("silent", ["flying_steps", "flying_calibration"])
async def test_a_slow_engine_stops_no_deadline(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep the other engines from being measured; it is not asked again before it has answered."""
    monkeypatch.setattr(clock, "TICK_S", TICK_S)
    client = Answering(silent)
    for number in range(16):
        client.open_request(f"r{number}")
    keeping = asyncio.get_running_loop().create_task(clock.keep_time(client, client.metrics))
    if silent == "flying_steps":
        while client.asked.count(0) < 3:
            await asyncio.sleep(TICK_S)
        assert client.asked.count(SLOW) == 1
    with pytest.raises(GracefulHTTPError, match="longer than its queue_deadline_s"):
        await asyncio.wait_for(client.wait(5 * TICK_S), 10)
    for task in (keeping, *client.tasks):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
