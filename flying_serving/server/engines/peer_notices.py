"""Notices to all engines of the engines that are present, at each loss and at each return."""

import asyncio
from collections.abc import Sequence
from typing import Any

from flying_serving.server.calls.engine_calls import EngineCalls, consume_exception
from flying_serving.server.engines.record import EngineRecord, incarnations


class PeerNotices:
    """The notices to all engines of a server. `records`: of all engines."""

    def __init__(self, calls: EngineCalls, records: Sequence[EngineRecord]) -> None:
        self._calls = calls
        self._records = records

    def tell_all(self, back: int | None = None) -> asyncio.Future[list[None]]:
        """Tell each engine which engines are present. Done when each has answered, or is lost too.

        An engine that fails or does not answer is killed: it would wait for lost engines, or go on
        with their KV. If it fails at the return of engine `back`, that engine is killed, and starts
        again later.
        """
        present, timeout_s = incarnations(self._records), self._calls.deployment.told_in_s
        calls = {
            engine: self._calls.utility(engine, "flying_peers", present, timeout_s=timeout_s)
            for engine in self._calls.engines
        }
        # each is awaited in a task of its own: all have been sent by now
        answers = {
            engine: consume_exception(asyncio.ensure_future(call)) for engine, call in calls.items()
        }
        blamed = {engine: engine if back is None else back for engine in answers}
        heard = [self._heard(engine, answers[engine], blamed[engine]) for engine in answers]
        return asyncio.ensure_future(asyncio.gather(*heard))

    async def _heard(self, engine: int, answer: asyncio.Future[Any], blamed: int) -> None:
        """Await the answer of an engine. Without an answer, kill the engine that is to blame."""
        record = self._records[blamed]
        process = record.process
        try:
            await answer
        except Exception as error:  # noqa: BLE001 - the engine does not know its peers
            ends = self._calls.ending or self._calls.channel.engines_dead
            if ends or not self._calls.reaches(engine):
                return
            if record.process is process and record.can_be_killed:
                record.kill(f"engine {engine} could not go on with those that are there: {error}")
