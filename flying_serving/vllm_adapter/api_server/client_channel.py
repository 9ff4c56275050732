"""The server's access to vLLM's engine client: messages to engines, their answers, and the queue of
outputs.
"""

import asyncio
import uuid
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.metrics.stats import SchedulerStats


def _identity(engine: int) -> bytes:
    """Return the name that vLLM gives an engine."""
    return engine.to_bytes(2, "little")


def idle() -> SchedulerStats:
    """Return the statistics that vLLM shows of an engine without requests."""
    return SchedulerStats()


def drop_unawaited(
    original: Any, output: UtilityOutput, utility_results: dict[int, asyncio.Future[Any]]
) -> None:
    """Wrap `_process_utility_output`, which fails at the answer to a call that has ended, and so is
    forgotten.
    """
    if output.call_id in utility_results:
        original(output, utility_results)


class ClientChannel:
    """The way to the engines and back: vLLM's AsyncMPClient, which need not be set up before the
    first message.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.outputs: Any = None
        """vLLM's output processor, once there was a request."""
        self._answers: WeakKeyDictionary[asyncio.Future[Any], asyncio.Future[Any]] = (
            WeakKeyDictionary()
        )

    @property
    def engines_dead(self) -> bool:
        """True if the engines of the server have ended, and it ends too."""
        return bool(self._client.resources.engine_dead)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that reads the engines' messages; None before it has begun to."""
        task = self._client.resources.output_queue_task
        return None if task is None else task.get_loop()

    def ensure_alive(self) -> None:
        """Raise EngineDeadError if an engine has ended."""
        self._client.ensure_alive()

    def encode(self, value: object) -> object:
        """Return the value as it would be sent. Raises as vLLM's encoder."""
        return self._client.encoder.encode(value)

    def send(self, kind: EngineCoreRequestType, content: Any, engine: int) -> Awaitable[Any]:
        """Put a message on its way before this returns. Raises EngineDeadError, or as vLLM's
        encoder.
        """
        sent: Awaitable[Any] = self._client._send_input(kind, content, _identity(engine))
        return sent

    def call(
        self, engine: int, method: str, args: tuple[Any, ...]
    ) -> asyncio.Future[tuple[Any, Any]]:
        """Call a utility of an engine, as `send`. The result is a pair, of which the second is the
        answer.
        """
        client, call_id = self._client, uuid.uuid1().int >> 64
        awaited: dict[int, asyncio.Future[Any]] = client.utility_results
        answer = awaited[call_id] = asyncio.get_running_loop().create_future()
        try:
            sent = self.send(
                EngineCoreRequestType.UTILITY, (client.client_index, call_id, method, args), engine
            )
        except Exception:
            del awaited[call_id]  # no answer will come
            raise
        client._ensure_output_queue_task()
        call = asyncio.gather(sent, answer)
        # a lost engine does not answer
        call.add_done_callback(lambda _: awaited.pop(call_id, None))
        self._answers[call] = answer
        return call

    def fail_call(self, call: asyncio.Future[tuple[Any, Any]], error: Exception) -> None:
        """End the wait for the answer to a call with an error."""
        answer = self._answers.get(call)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def hide_engine(self, engine: int) -> None:
        """Hide a lost engine from vLLM, which then sends it nothing by itself, and counts no
        request of it.
        """
        # it may have been lost before its return
        if _identity(engine) in self._client.core_engines:
            self._client.core_engines.remove(_identity(engine))
        self._client.core_engine = next(iter(self._client.core_engines), self._client.core_engine)
        self._client.outputs_queue.put_nowait(
            EngineCoreOutputs(engine_index=engine, scheduler_stats=idle())
        )

    def show_engine(self, engine: int) -> None:
        """Show vLLM an engine that is back."""
        self._client.core_engines.append(_identity(engine))
        self._client.core_engines.sort()
        self._client.core_engine = self._client.core_engines[0]

    def fail_calls(self, error: Exception) -> None:
        """End every wait for an answer with an error."""
        for answer in list(self._client.utility_results.values()):
            if not answer.done():
                answer.set_exception(error)

    def end_requests(self, request_ids: list[str], reason: FinishReason) -> None:
        """Tell vLLM that requests are over, as if an engine had said it."""
        ends = [
            EngineCoreOutput(request_id, [], finish_reason=reason) for request_id in request_ids
        ]
        if ends:
            self._client.outputs_queue.put_nowait(
                EngineCoreOutputs(outputs=ends, finished_requests=set(request_ids))
            )

    def forget(self, request_id: str) -> list[str]:
        """Have vLLM forget a request that it has begun to add, and all of its `n`. Returns their
        ids.
        """
        state = None if self.outputs is None else self.outputs.request_states.get(request_id)
        if state is None:
            return [request_id]
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        forgotten: list[str] = self.outputs.abort_requests([whole], internal=True)
        return forgotten

    def fail_request(
        self, request_id: str, why: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    ) -> None:
        """End a request, and all of its `n`, with this status and text, for a stream or a whole
        answer.
        """
        state = None if self.outputs is None else self.outputs.request_states.get(request_id)
        if state is None or state.queue is None:
            self.end_requests([request_id], FinishReason.ERROR)
        else:
            # wrapped as vLLM wraps errors of a request's own input, which it hands on as they are
            state.queue.put(InputStreamError(GracefulHTTPError(why, status)))

    def end_server(self, error: Exception) -> None:
        """Raise an error where vLLM reads outputs, which ends the server."""
        self._client.outputs_queue.put_nowait(error)
