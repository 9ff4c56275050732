"""The end of the client: what runs may finish, what is left gets an answer, and engines hear when they may leave."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError, RetryableRequestError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from flying_serving.errors import ServerEnds
from tests.server.test_client import PAIRS, UTILITY, Client

SAYS = "^the server is shutting down$"


def served(*request_ids: str) -> tuple[Client, OutputProcessor, list[RequestOutputCollector]]:
    """Return a client and vLLM's output processor that have these requests, and where their outputs go."""
    client, outputs, queues = Client(), OutputProcessor(None, log_stats=False), []
    client.resources = SimpleNamespace(engine_dead=False, output_queue_task=asyncio.current_task())
    for request_id in request_ids:
        client.open_request(request_id)
        params = SamplingParams(max_tokens=20)
        request = EngineCoreRequest(request_id, [1], None, params, None, 0.0, None, None, None)
        request.external_req_id = request_id
        queues.append(RequestOutputCollector(params.output_kind, request_id))
        outputs.add_request(request, None, None, 0, queues[-1])
    client.messages.clear()
    return client, outputs, queues


async def ends(client: Client, timeout_s: float, outputs: OutputProcessor) -> asyncio.Task[float | None]:
    """Let the client end, as vLLM does: in a thread. Its messages are sent, and answered."""
    task = asyncio.ensure_future(asyncio.to_thread(client.end, timeout_s, outputs))
    for _ in range(20):
        await asyncio.sleep(0.01)
        client.sent()
    return task


def told(client: Client, method: str) -> list[int]:
    """Return the engines that have been told something."""
    return [engine for kind, what, engine in client.messages if (kind, what) == (UTILITY, method)]


async def test_requests_may_finish_before_engines_may_leave() -> None:
    """What comes meanwhile is refused; what is left of the time is for the engines."""
    client, outputs, (queue,) = served("a")
    began_s = time.monotonic()
    ending = await ends(client, 30.0, outputs)
    assert not ending.done()
    assert told(client, "flying_leave") == []
    with pytest.raises(GracefulHTTPError, match=SAYS):
        client.check({})
    outputs.abort_requests(["a"], internal=True)
    while not ending.done():
        await asyncio.sleep(0.01)
        client.sent()
    left_s = await ending
    assert left_s is not None
    assert 0 < left_s <= 30.0 - (time.monotonic() - began_s) + 0.5
    assert told(client, "flying_leave") == [0, 1, 2, 3]
    assert queue.get_nowait().finished  # type: ignore[union-attr]


async def test_what_is_left_at_the_end_gets_an_answer() -> None:
    """Each request an error that vLLM hands on without a trace in the log; orders and questions one as well."""
    client, outputs, queues = served("a", "b")
    order = asyncio.ensure_future(client.switch(PAIRS, "sequential"))
    await asyncio.sleep(0)
    asked = asyncio.ensure_future(client.utility(2, "flying_report"))
    late = client._deadlines["late"] = asyncio.get_running_loop().create_future()
    assert await asyncio.wait_for(asyncio.to_thread(client.end, 0.0, outputs), 5) == 0.0
    for queue in queues:
        with pytest.raises(InputStreamError) as caught:
            queue.get_nowait()
        assert isinstance(caught.value.cause, RetryableRequestError)
    for sent in client.sends:
        sent.set_result(None)
    for waiting in (order, asked):
        with pytest.raises(ServerEnds, match=SAYS):
            await asyncio.wait_for(waiting, 5)
    with pytest.raises(GracefulHTTPError, match=SAYS):
        await late
    assert told(client, "flying_leave") == []


async def test_the_reader_of_outputs_ends_without_an_error() -> None:
    """Only if the server has been told to end: vLLM's word that engines are gone is news else."""
    client, outputs, _ = served()
    client.outputs_queue.put_nowait(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await client.get_output_async()
    await asyncio.wait_for(asyncio.to_thread(client.end, 0.0, outputs), 5)
    client.outputs_queue.put_nowait(EngineDeadError())
    reader: asyncio.Task[Any] = asyncio.ensure_future(client.get_output_async())
    await asyncio.wait([reader], timeout=5)
    assert reader.cancelled()
