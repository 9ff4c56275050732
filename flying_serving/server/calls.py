"""Calls of engine utilities: to one engine or to each, sent at once, answered in time or EngineLost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Coroutine
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from flying_serving.config import Deployment
from flying_serving.errors import EngineLost


class EngineCalls(AsyncMPClient):
    """vLLM's client for several engines that do not depend on each other, with utilities of each."""

    deployment: Deployment

    def utility(self, engine: int, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Call a utility of one engine.

        The call is sent before this returns, so that what is sent later comes later. Awaiting the result raises
        EngineLost if there is no answer in time.
        """
        call_id = uuid.uuid1().int >> 64
        answer = self.utility_results[call_id] = asyncio.get_running_loop().create_future()
        call = (self.client_index, call_id, method, args)
        sent = self._send_input(EngineCoreRequestType.UTILITY, call, self.core_engines[engine])
        self._ensure_output_queue_task()
        return self._answered(asyncio.gather(sent, answer), engine, method)

    async def _answered(self, call: Awaitable[Any], engine: int, method: str) -> Any:
        timeout_s = self.deployment.flying.collective_timeout_s
        try:
            return (await asyncio.wait_for(call, timeout_s))[1]
        except TimeoutError:
            raise EngineLost(f"engine {engine} did not answer {method} within {timeout_s} s") from None

    def of_engines(self, method: str) -> list[Coroutine[Any, Any, Any]]:
        """Calls of a utility of every engine, to be awaited together."""
        return [self.utility(engine, method) for engine in range(self.deployment.engines)]

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """vLLM's utilities go to every engine; the first one's answer counts, as in vLLM's own client."""
        return (await self.call_utility_all_async(method, *args))[0]
