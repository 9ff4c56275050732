"""A call of /v1/responses that uses built-in tools: each of its turns has the priority that its
client chose.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from flying_serving.config import FlyingConfig
from flying_serving.server.patches import check_response
from flying_serving.server.requests.rights import ClientRights
from tests.with_vllm.server.doubles import Server
from tests.with_vllm.server.engine_clients import EngineClient

PROMPT = {"prompt_token_ids": list(range(10))}


def engine_of(*, has_key: bool, **flying: Any) -> EngineClient:
    """Return the engine client of a server with these settings of `serve`."""
    engine = EngineClient(Server())
    engine.server.shell.checks.rights = ClientRights(FlyingConfig(policy="manual", **flying))
    engine.server.shell.checks.rights.has_key = has_key
    return engine


def priorities(engine: EngineClient) -> list[int]:
    """Return those of the requests that the controller has been given."""
    return [state.spec.priority for state in engine.server.controller.state.started.values()]


class Context:
    """A conversation in which the model calls a tool after each of its first turns."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self.request_metrics: Any = None

    def append_output(self, _: Any) -> None: ...

    def append_tool_output(self, _: Any) -> None: ...

    def need_builtin_tool_call(self) -> bool:
        """Whether one more turn comes."""
        self._calls -= 1
        return self._calls >= 0

    async def call_tool(self) -> list[Any]:
        """What the tool says."""
        await asyncio.sleep(0)
        return []


def respond(engine: EngineClient, priority: int) -> AsyncIterator[Any]:
    """A call with two calls of tools, by vLLM's own loop over turns."""
    serving = SimpleNamespace(
        engine_client=engine,
        model_config=SimpleNamespace(max_model_len=400),
        _log_inputs=lambda *_, **__: None,
    )
    loop = OpenAIServingResponses._generate_with_builtin_tools
    original = getattr(loop, "__wrapped__", loop)
    given = {
        "request_id": "r",
        "engine_input": PROMPT,
        "sampling_params": SamplingParams(max_tokens=20),
    }
    answer: AsyncIterator[Any] = check_response(
        original, serving, **given, context=Context(2), priority=priority
    )
    return answer


async def read(answer: AsyncIterator[Any]) -> None:
    """Read an answer in a task of its own, as its stream is."""

    async def to_the_end() -> None:
        async for _ in answer:
            pass

    await asyncio.wait_for(asyncio.create_task(to_the_end()), 10)


@pytest.mark.parametrize(
    ("has_key", "flying", "priority"),
    [
        (True, {}, 0),
        (False, {"clients_may_set": ("none",)}, 0),
        (False, {"most_urgent_priority": 0}, 0),
        (True, {"most_urgent_priority": -3}, -3),
        (False, {}, 0),
        (False, {}, 5),
        (False, {}, -1),
    ],
    ids=str,
)
async def test_each_turn_has_the_priority_of_its_call(
    has_key: bool, flying: dict[str, Any], priority: int
) -> None:
    engine = engine_of(has_key=has_key, **flying)
    await read(respond(engine, priority))
    assert priorities(engine) == [priority] * 3


async def test_a_turn_of_a_call_that_is_not_urgent_counts_as_not_urgent() -> None:
    engine = engine_of(has_key=False)
    await read(respond(engine, 0))
    assert not any(state.spec.urgent for state in engine.server.controller.state.started.values())


async def test_a_priority_beyond_the_clients_rights_is_refused_at_once() -> None:
    with pytest.raises(
        VLLMValidationError, match=r"^priority=-1: clients may not set it on this server"
    ):
        respond(engine_of(has_key=True), -1)


async def test_the_priority_of_one_call_is_not_that_of_another_request() -> None:
    """Which is answered at the same time."""
    engine = engine_of(has_key=False)

    async def other() -> None:
        async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=20), "other", priority=7):
            pass

    async def responses() -> None:
        await read(respond(engine, 0))

    await asyncio.gather(asyncio.create_task(responses()), asyncio.create_task(other()))
    assert sorted(priorities(engine)) == [0, 0, 0, 7]
