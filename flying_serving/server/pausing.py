"""The part of the engine client behind vLLM's routes of dev mode: `/pause`, `/sleep` and what belongs to them."""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, PauseMode

from flying_serving.server.ending import EndingClient


class PausingClient(EndingClient):
    """vLLM's client for several engines that can be paused, whatever groups they work in."""

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause all lanes of all engines. What comes later waits, in the engines or in the task pool, until resumed."""
        await self._end_all_if(mode)
        await super().pause_scheduler_async(mode, clear_cache)

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, which is what level 0 is.

        Raises:
            GracefulHTTPError: 400 for a level that lets go of memory, which lanes share.
        """
        if level > 0:
            raise _unsupported(f"level={level}: must be 0; sleep mode")
        await self._end_all_if(mode)
        await super().sleep_async(level, mode)

    async def release_kv_cache_memory_async(self) -> None:
        """Raise GracefulHTTPError (400): lanes share the KV memory."""
        raise _unsupported("releasing KV memory")

    async def _end_all_if(self, mode: PauseMode) -> None:
        """By "abort" every request ends, those that wait in the task pool or are on their way to another group too."""
        if mode != "abort":
            return
        ids = self.controller.open_requests
        ends = [EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT) for request_id in ids]
        if ends:
            self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=ends, finished_requests=set(ids)))
            await self.abort_requests_async(ids)


def _unsupported(what: str) -> GracefulHTTPError:
    return GracefulHTTPError(f"{what} cannot be served by Flying Serving yet", HTTPStatus.BAD_REQUEST)
