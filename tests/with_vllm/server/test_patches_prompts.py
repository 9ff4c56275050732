"""A call with more prompts than an idle server admits is refused for good, and no other."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from flying_serving.controller.requests import RequestSpec
from flying_serving.server.patches import check_conversations, check_inputs, check_prompts
from tests.with_vllm.server.doubles import Server
from tests.with_vllm.server.engine_clients import EngineClient

MOST = 16 + 20
"""Four engines run four requests each, and twenty wait."""


class Serving:
    """What vLLM's routes are, as far as our hooks look at it; `rendered`: prompts as tokens."""

    def __init__(self, server: Server, rendered: list[dict[str, Any]]) -> None:
        self.engine_client: Any = EngineClient(server)
        self.rendered = rendered

    async def completions(self, _: object) -> Any:
        """`render_completion_request`."""
        return self.rendered

    async def conversations(self, _: object) -> Any:
        """`render_batch_chat_request`."""
        return [], [], self.rendered

    async def inputs(self, _: object) -> None:
        """`_prepare_generators`."""
        self.rendered = []


async def call(serving: Serving, field: str, n: int = 1) -> None:
    """Make a call whose body has its prompts in this field. Raises VLLMValidationError."""
    request = SimpleNamespace(n=n, **{field: serving.rendered})
    if field == "prompt":
        rendered = await check_prompts(Serving.completions, serving, request)
        assert rendered is serving.rendered
    elif field == "messages":
        rendered = await check_conversations(Serving.conversations, serving, request)
        assert rendered[2] is serving.rendered
    else:
        given = [{"prompts": prompt} for prompt in serving.rendered]
        ctx = SimpleNamespace(request=request, engine_inputs=given)
        await check_inputs(Serving.inputs, serving, ctx)
        assert serving.rendered == []


def prompts(count: int, tokens: int = 10) -> list[dict[str, Any]]:
    """So many prompts, as vLLM hands them to its engine client."""
    return [{"prompt_token_ids": list(range(tokens))} for _ in range(count)]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("count", [MOST + 1, 300])
@pytest.mark.parametrize("field", ["prompt", "messages", "input", "documents", "text_2"])
async def test_more_prompts_than_ever_fit_are_refused(field: str, count: int, busy: bool) -> None:
    """Whatever else the server has to do."""
    server = Server(most_waiting=20)
    if busy:
        for number in range(30):
            server.controller.arrived(f"r{number}", RequestSpec(10, 15), 0.0)
    with pytest.raises(VLLMValidationError) as refused:
        await call(Serving(server, prompts(count)), field)
    assert refused.value.parameter == field
    assert str(refused.value).startswith(
        f"{field}: {count} prompts, must be at most {MOST} on this server: that many run and wait"
    )


@pytest.mark.parametrize("count", [1, 2, MOST])
@pytest.mark.parametrize("field", ["prompt", "messages", "input"])
async def test_prompts_that_fit_on_an_idle_server_are_not_refused(field: str, count: int) -> None:
    await call(Serving(Server(most_waiting=20), prompts(count)), field)


async def test_outputs_of_all_prompts_count() -> None:
    server = Server(most_waiting=20)
    await call(Serving(server, prompts(MOST // 3)), "prompt", n=3)
    with pytest.raises(VLLMValidationError, match=r"13 prompts, must be at most 12 of n=3 outputs"):
        await call(Serving(server, prompts(MOST // 3 + 1)), "prompt", n=3)


async def test_outputs_of_one_prompt_are_checked_when_it_is_let_in() -> None:
    """The field is `n` then."""
    await call(Serving(Server(most_waiting=20), prompts(1)), "prompt", n=MOST + 1)


async def test_refusals_of_vllm_are_handed_on() -> None:
    """An ErrorResponse, in place of prompts."""
    serving, refusal = Serving(Server(most_waiting=20), []), SimpleNamespace(error="no model")

    async def refuse(*_: object) -> Any:
        return refusal

    for hook in (check_prompts, check_conversations):
        assert await hook(refuse, serving, SimpleNamespace(n=1)) is refusal


async def test_other_servers_have_no_such_bound() -> None:
    """Where the engine client is vLLM's own."""
    serving = Serving(Server(most_waiting=20), prompts(300))
    serving.engine_client = SimpleNamespace(engine_core=object())
    await call(serving, "prompt")
