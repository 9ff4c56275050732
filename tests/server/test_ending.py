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
from flying_serving.server.ending import LEAVE_S
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


async def test_the_death_of_an_engine_ends_the_wait() -> None:
    """What is left gets an answer, and the others, which have not heard that they may leave, are not waited for."""
    client, outputs, (queue,) = served("a")
    ending = await ends(client, 30.0, outputs)
    asked = asyncio.ensure_future(client.utility(2, "flying_report"))
    await asyncio.sleep(0)
    client.resources.engine_dead = True
    left_s = await asyncio.wait_for(ending, 5)
    assert left_s is not None
    assert left_s <= LEAVE_S
    with pytest.raises(InputStreamError):
        queue.get_nowait()
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    assert told(client, "flying_leave") == []


async def test_an_end_that_fails_is_logged_and_calls_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM goes on to end the engines, whatever it was."""
    client, outputs, _ = served("a")
    ending = await ends(client, 30.0, outputs)
    asked = asyncio.ensure_future(client.utility(2, "flying_report"))

    def fail() -> int:
        raise ValueError("planted")

    outputs.get_num_unfinished_requests = fail  # type: ignore[method-assign]
    assert await asyncio.wait_for(ending, 5) is not None
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    assert "planted" in caplog.text


async def test_an_end_from_the_event_loop_waits_for_nothing() -> None:
    """As when vLLM cannot set up its routes: engines have the whole time, and hear at once that they may leave."""
    client, outputs, (queue,) = served("a")
    asked = asyncio.ensure_future(client.utility(2, "flying_report"))
    left_s = client.end(30.0, outputs)
    assert left_s is not None
    assert left_s > 25
    assert told(client, "flying_leave") == [0, 1, 2, 3]
    with pytest.raises(InputStreamError):
        queue.get_nowait()
    await asyncio.sleep(0)
    client.sent()
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    await asyncio.wait(client.tasks, timeout=5)
    assert not client.tasks


async def test_engines_are_not_waited_for_if_one_is_gone_already() -> None:
    client, outputs, _ = served()
    client.resources.engine_dead = True
    left_s = await asyncio.wait_for(asyncio.to_thread(client.end, 30.0, outputs), 5)
    assert left_s == LEAVE_S
    assert not client.ending


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
