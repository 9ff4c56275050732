"""The end of the client: what runs may finish, what is left gets an answer, and engines hear when
they may leave.
"""

import asyncio
import time
from typing import Any

import pytest
from vllm.exceptions import GracefulHTTPError, RetryableRequestError
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from flying_serving.errors import ServerEnds
from flying_serving.server.engines.shutdown import LEAVE_S, let_requests_end
from tests.with_vllm.server.doubles import PAIRS, Server, request

SAYS = "^the server is shutting down$"


def served(*request_ids: str) -> tuple[Server, OutputProcessor, list[RequestOutputCollector]]:
    """Return a server and vLLM's output processor that have these requests, and where their outputs
    go.
    """
    server, outputs, queues = Server(), OutputProcessor(None, log_stats=False), []
    server.vllm.resources.output_queue_task = asyncio.current_task()
    for request_id in request_ids:
        server.open_request(request_id)
        known = request(request_id)
        known.external_req_id = request_id
        queues.append(RequestOutputCollector(known.sampling_params.output_kind, request_id))
        outputs.add_request(known, None, None, 0, queues[-1])
    server.messages.clear()
    return server, outputs, queues


async def ends(server: Server, timeout_s: float, outputs: OutputProcessor) -> asyncio.Task[float]:
    """Let the server end, as vLLM does: in a thread. Its messages are sent, and answered."""
    task = asyncio.ensure_future(
        asyncio.to_thread(let_requests_end, server.shell, outputs, timeout_s)
    )
    await server.settle(20)
    return task


async def test_requests_may_finish_before_engines_may_leave() -> None:
    """What comes meanwhile is refused; what is left of the time is for the engines."""
    server, outputs, (queue,) = served("a")
    began_s = time.monotonic()
    ending = await ends(server, 30.0, outputs)
    assert not ending.done()
    assert server.told("flying_leave") == []
    with pytest.raises(GracefulHTTPError, match=SAYS):
        await server.shell.add(request("late"))
    with pytest.raises(GracefulHTTPError, match=SAYS):
        server.shell.checks.let_in("late", {}, server)
    waited_s = time.monotonic() - began_s
    outputs.abort_requests(["a"], internal=True)
    while not ending.done():
        await asyncio.sleep(0.01)
        server.sent()
    left_s = await ending
    assert 0 < left_s <= 30.0 - waited_s
    assert server.told("flying_leave") == [0, 1, 2, 3]
    assert queue.get_nowait().finished  # type: ignore[union-attr]


async def test_open_requests_and_calls_are_answered_at_the_end() -> None:
    """Each request an error that vLLM hands on without a trace in the log; orders and questions one
    as well.
    """
    server, outputs, queues = served("a", "b")
    order = asyncio.ensure_future(server.orders.switch(PAIRS, "sequential"))
    await asyncio.sleep(0)
    asked = asyncio.ensure_future(server.calls.utility(2, "flying_report"))
    assert (
        await asyncio.wait_for(asyncio.to_thread(let_requests_end, server.shell, outputs, 0.0), 5)
        == 0.0
    )
    for queue in queues:
        with pytest.raises(InputStreamError) as caught:
            queue.get_nowait()
        assert isinstance(caught.value.cause, RetryableRequestError)
    for sent in server.vllm.sends:
        sent.set_result(None)
    for waiting in (order, asked):
        with pytest.raises(ServerEnds, match=SAYS):
            await asyncio.wait_for(waiting, 5)
    assert server.told("flying_leave") == []


async def test_a_request_that_was_let_in_arrives_although_the_server_ends() -> None:
    """Its answer may have begun: it is waited for, until engines may leave."""
    server, outputs, _ = served()
    new, answer = request("a"), asyncio.Queue[None]()
    new.external_req_id = "call"
    fields = {name: getattr(new, name) for name in new.__struct_fields__}
    server.shell.checks.let_in("call", fields, answer)
    ending = await ends(server, 30.0, outputs)
    assert not ending.done()
    adding = asyncio.ensure_future(server.shell.add(new))
    await server.settle(3)
    await asyncio.wait_for(adding, 5)
    assert server.controller.state.open_requests == ["a"]
    await server.settle(20)
    assert await asyncio.wait_for(ending, 5) > 0
    with pytest.raises(GracefulHTTPError, match=SAYS):
        server.shell.checks.check_end("call")


async def test_the_death_of_an_engine_ends_the_wait() -> None:
    """What is left gets an answer, and the others, which have not heard that they may leave, are
    not waited for.
    """
    server, outputs, (queue,) = served("a")
    ending = await ends(server, 30.0, outputs)
    asked = asyncio.ensure_future(server.calls.utility(2, "flying_report"))
    await asyncio.sleep(0)
    server.vllm.resources.engine_dead = True
    left_s = await asyncio.wait_for(ending, 5)
    assert left_s <= LEAVE_S
    with pytest.raises(InputStreamError):
        queue.get_nowait()
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    assert server.told("flying_leave") == []


async def test_an_end_that_fails_is_logged_and_calls_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM goes on to end the engines, whatever it was."""
    server, outputs, _ = served("a")
    ending = await ends(server, 30.0, outputs)
    asked = asyncio.ensure_future(server.calls.utility(2, "flying_report"))

    def fail() -> int:
        raise ValueError("injected")

    outputs.get_num_unfinished_requests = fail  # type: ignore[method-assign]
    assert await asyncio.wait_for(ending, 5) > 0
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    assert "injected" in caplog.text


async def test_end_from_the_event_loop_does_not_wait() -> None:
    """As when vLLM cannot set up its routes: engines have the whole time, and hear at once that
    they may leave.
    """
    server, outputs, (queue,) = served("a")
    asked = asyncio.ensure_future(server.calls.utility(2, "flying_report"))
    left_s = let_requests_end(server.shell, outputs, 30.0)
    assert left_s > 25
    assert server.told("flying_leave") == [0, 1, 2, 3]
    with pytest.raises(InputStreamError):
        queue.get_nowait()
    await asyncio.sleep(0)
    server.sent()
    with pytest.raises(ServerEnds, match=SAYS):
        await asyncio.wait_for(asked, 5)
    await asyncio.wait(server.calls.tasks, timeout=5)
    assert not server.calls.tasks


async def test_engines_are_not_waited_for_if_one_is_gone_already() -> None:
    server, outputs, _ = served()
    server.vllm.resources.engine_dead = True
    left_s = await asyncio.wait_for(
        asyncio.to_thread(let_requests_end, server.shell, outputs, 30.0), 5
    )
    assert left_s == LEAVE_S
    assert not server.calls.ending


async def test_the_reader_of_outputs_ends_without_an_error() -> None:
    """Only if the server has been told to end: vLLM's word that engines are gone is news else."""
    server, outputs, _ = served()
    server.vllm.outputs_queue.put_nowait(EngineDeadError())
    with pytest.raises(EngineDeadError):
        await server.read()
    await asyncio.wait_for(asyncio.to_thread(let_requests_end, server.shell, outputs, 0.0), 5)
    server.vllm.outputs_queue.put_nowait(EngineDeadError())
    reader: asyncio.Task[Any] = asyncio.ensure_future(server.read())
    await asyncio.wait([reader], timeout=5)
    assert reader.cancelled()
