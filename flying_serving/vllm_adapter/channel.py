"""What the server uses of vLLM's engine client: messages to engines, their answers, and the queue of outputs."""

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason


class ClientChannel:
    """The way to the engines and back: vLLM's AsyncMPClient, which need not be set up before the first message."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def engines_dead(self) -> bool:
        """Whether an engine has ended."""
        return bool(self._client.resources.engine_dead)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that reads what engines send; None before it has begun to."""
        task = self._client.resources.output_queue_task
        return None if task is None else task.get_loop()

    def ensure_alive(self) -> None:
        """Raise EngineDeadError if an engine has ended."""
        self._client.ensure_alive()

    def encode(self, value: object) -> object:
        """The value as it would be sent. Raises as vLLM's encoder."""
        return self._client.encoder.encode(value)

    def send(self, kind: EngineCoreRequestType, content: Any, engine: int) -> Awaitable[Any]:
        """Put a message on its way before this returns. Raises EngineDeadError, or as vLLM's encoder."""
        sent: Awaitable[Any] = self._client._send_input(kind, content, self._client.core_engines[engine])
        return sent

    def call(self, engine: int, method: str, args: tuple[Any, ...]) -> asyncio.Future[tuple[Any, Any]]:
        """Call a utility of an engine, as `send`. The result is a pair, of which the second is the answer."""
        client, call_id = self._client, uuid.uuid1().int >> 64
        answer = client.utility_results[call_id] = asyncio.get_running_loop().create_future()
        try:
            sent = self.send(EngineCoreRequestType.UTILITY, (client.client_index, call_id, method, args), engine)
        except Exception:
            del client.utility_results[call_id]  # no answer will come
            raise
        client._ensure_output_queue_task()
        return asyncio.gather(sent, answer)

    def fail_calls(self, error: Exception) -> None:
        """End every wait for an answer with an error."""
        for answer in list(self._client.utility_results.values()):
            if not answer.done():
                answer.set_exception(error)

    def end_requests(self, request_ids: list[str], reason: FinishReason) -> None:
        """Tell vLLM that requests are over, as if an engine had said so."""
        ends = [EngineCoreOutput(request_id, [], finish_reason=reason) for request_id in request_ids]
        if ends:
            self._client.outputs_queue.put_nowait(EngineCoreOutputs(outputs=ends, finished_requests=set(request_ids)))

    def end_server(self, error: Exception) -> None:
        """Raise an error where vLLM reads outputs, which ends the server."""
        self._client.outputs_queue.put_nowait(error)
