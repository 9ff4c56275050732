"""Shell.add: requests whose clients leave while they are added, and those that are refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError

from tests.with_vllm.server.doubles import ABORT, Server, request


class Outputs:
    """What the channel uses of vLLM's output processor: it has begun to add two requests that
    belong together.
    """

    def __init__(self, *request_ids: str) -> None:
        parent = SimpleNamespace(request_id="whole")
        self.request_states = {
            one: SimpleNamespace(parent_req=parent, queue=None) for one in request_ids
        }

    def abort_requests(self, request_ids: list[str], *, internal: bool) -> list[str]:
        """Forget both."""
        assert request_ids == ["whole"]
        assert internal is True
        forgotten = list(self.request_states)
        self.request_states.clear()
        return forgotten


async def test_a_client_that_leaves_while_its_request_is_added_ends_it() -> None:
    """VLLM aborts only what it was given back, and so would let it run for nobody; so it is with
    all of its `n`.
    """
    server = Server()
    server.calls.channel.outputs = outputs = Outputs("first", "second")
    server.open_request("first")
    task = asyncio.get_running_loop().create_task(server.shell.add(request("second")))
    await asyncio.sleep(0)
    assert server.controller.state.running == 2
    task.cancel()
    await asyncio.sleep(0)
    server.sent()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.controller.state.open_requests == []
    assert outputs.request_states == {}
    assert sorted(name for kind, name, _ in server.messages if kind is ABORT) == ["first", "second"]


async def test_vllm_forgets_a_request_that_is_refused() -> None:
    server = Server()
    server.calls.channel.outputs = outputs = Outputs("long")
    with pytest.raises(VLLMValidationError):
        await server.shell.add(request("long", prompt_tokens=1000))
    assert outputs.request_states == {}
