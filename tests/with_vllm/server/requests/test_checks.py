"""Refusals come before an answer begins: what is let in is served, however many come at once."""

import asyncio
import gc
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from flying_serving.server.patches import check_response
from tests.with_vllm.server.doubles import Server
from tests.with_vllm.server.engine_clients import OUTPUTS, EngineClient

AT_ONCE = 16
"""Four engines run four requests each."""
MOST_WAITING = 20
PROMPT = {"prompt_token_ids": list(range(10))}
Answer = AsyncIterator[Any]
FIELDS: dict[str, Any] = {
    "sampling_params": SamplingParams(),
    "priority": 0,
    "prompt_token_ids": [1, 2, 3],
    "prompt_embeds": None,
}


def generate(engine: EngineClient, request_id: str, *, n: int = 1, **named: Any) -> Answer:
    """A call. Raises GracefulHTTPError if it is refused."""
    given = {"prompt": PROMPT, "sampling_params": SamplingParams(max_tokens=OUTPUTS, n=n)}
    return engine.generate(request_id=request_id, **given | named)


def respond(engine: EngineClient, request_id: str, **named: Any) -> Answer:
    """A call of /v1/responses, whose answer makes the call to the engine when it is read."""

    async def read() -> Answer:
        async for output in generate(engine, f"{request_id}_0"):
            yield output

    params = SamplingParams(max_tokens=OUTPUTS)
    given = {"request_id": request_id, "engine_input": PROMPT, "sampling_params": params}
    answer: Answer = check_response(
        lambda *_, **__: read(), SimpleNamespace(engine_client=engine), **given | named
    )
    return answer


def asked(engine: EngineClient, count: int, how: str) -> list[Answer]:
    """Return the answers to as many calls as are let in; all are made before any answer is read."""
    call = respond if how == "responses" else generate
    answers = []
    for number in range(count):
        try:
            answers.append(call(engine, f"call {number}"))
        except GracefulHTTPError as error:
            assert error.http_status == 429
    return answers


@pytest.mark.parametrize("how", ["generate", "responses"])
@pytest.mark.parametrize("capped", [True, False])
async def test_no_answer_of_a_burst_is_refused_after_its_begin(how: str, capped: bool) -> None:
    """As many as run or may wait are let in, and all of those are served."""
    engine = EngineClient(Server(capped=capped, most_waiting=MOST_WAITING))
    answers = asked(engine, 80, how)
    read = await asyncio.gather(*(anext(answer) for answer in answers))
    assert len(read) == AT_ONCE + MOST_WAITING
    assert engine.server.controller.admission.refused == 80 - len(read)
    assert len(engine.server.controller.state.open_requests) == len(read)
    assert not engine.server.controller.admission.slots


async def test_all_outputs_of_a_call_have_a_slot() -> None:
    engine = EngineClient(Server(most_waiting=MOST_WAITING))
    answers = [generate(engine, "a", n=AT_ONCE), generate(engine, "b", n=MOST_WAITING)]
    with pytest.raises(GracefulHTTPError, match="20 requests wait already"):
        generate(engine, "c")
    read = await asyncio.gather(*(anext(answer) for answer in answers))
    assert [output.request_id for output in read] == ["a", "b"]
    assert len(engine.server.controller.state.open_requests) == AT_ONCE + MOST_WAITING


@pytest.mark.parametrize("n", [AT_ONCE + MOST_WAITING + 1, 1000])
async def test_more_outputs_than_ever_fit_are_refused_for_good(n: int) -> None:
    engine = EngineClient(Server(most_waiting=MOST_WAITING))
    with pytest.raises(VLLMValidationError) as refused:
        generate(engine, "a", n=n)
    most = AT_ONCE + MOST_WAITING
    assert str(refused.value).startswith(
        f"n={n}: must be a whole number from 1 to {most} on this server"
    )
    assert refused.value.parameter == "n"
    assert not engine.server.controller.admission.slots


@pytest.mark.deep
async def test_outputs_that_fit_on_an_idle_server_may_be_asked_for_again() -> None:
    engine = EngineClient(Server(most_waiting=MOST_WAITING))
    first = generate(engine, "a")
    with pytest.raises(
        GracefulHTTPError, match="0 requests wait already, and n=36 adds 36"
    ) as refused:
        generate(engine, "b", n=AT_ONCE + MOST_WAITING)
    assert refused.value.http_status == 429
    del first
    gc.collect()
    generate(engine, "b", n=AT_ONCE + MOST_WAITING)


@pytest.mark.deep
@pytest.mark.parametrize("how", ["generate", "responses"])
async def test_unread_answer_releases_its_slots(how: str) -> None:
    """Its client has left before it began."""
    engine = EngineClient(Server(most_waiting=MOST_WAITING))
    for _ in range(3):
        answers = asked(engine, 80, how)
        assert len(answers) == AT_ONCE + MOST_WAITING
        del answers
        gc.collect()
        assert not engine.server.controller.admission.slots


async def test_calls_of_one_name_have_slots_each() -> None:
    """Clients choose the name (X-Request-Id)."""
    engine = EngineClient(Server(most_waiting=MOST_WAITING))
    answers = [generate(engine, "same") for _ in range(AT_ONCE + MOST_WAITING)]
    with pytest.raises(GracefulHTTPError, match="20 requests wait already"):
        generate(engine, "same")
    del answers
    gc.collect()
    assert not engine.server.controller.admission.slots


@pytest.mark.parametrize("n", [1, 8])
async def test_outputs_of_one_call_are_one_event(n: int) -> None:
    """The rate is that of requests, as if they came evenly."""
    engine = EngineClient(Server())
    now_s = 0.0
    engine.server.shell.clock = lambda: now_s
    demand = engine.server.controller.state.demand
    for number in range(1, 200 // n + 1):
        now_s = float(number * n)
        await anext(generate(engine, f"call {number}", n=n))
        controller = engine.server.controller
        controller.finished(controller.state.open_requests, now_s, aborted=True)
    assert 0.5 < demand.work(0, 0, 0, now_s + n / 2).rate < 2.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_embeddings_that_are_no_numbers_are_refused_before_an_answer(
    value: float, dtype: torch.dtype
) -> None:
    """Whichever of them is none. The answer names the field."""
    engine, embeds = EngineClient(Server()), torch.ones(10, 4, dtype=dtype)
    generate(engine, "a", prompt={"prompt_embeds": embeds})
    embeds[9, 3] = value
    with pytest.raises(VLLMValidationError, match="prompt_embeds: must be finite") as refused:
        generate(engine, "b", prompt={"prompt_embeds": embeds})
    assert refused.value.parameter == "prompt_embeds"


@pytest.mark.parametrize("how", ["generate", "responses"])
async def test_no_file_of_an_adapter_is_looked_at(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system may hang, and with it the event loop. An engine that has the adapter serves
    it, also when its folder has gone.
    """

    def looked_at(path: object, **options: object) -> None:
        raise AssertionError(f"{path} was looked at")

    engine = EngineClient(Server())
    for function in ("stat", "open"):
        monkeypatch.setattr(os, function, looked_at)
    call = respond if how == "responses" else generate
    call(engine, "a", lora_request=LoRARequest("later", 1, str(tmp_path / "gone")))


@pytest.mark.parametrize("adapter", [None, LoRARequest("later", 7, "/a/folder")])
def test_the_controller_hears_of_the_adapter(adapter: LoRARequest | None) -> None:
    spec = Server().shell.checks.checked_spec({**FIELDS, "lora_request": adapter})
    assert spec.variant == (None if adapter is None else 7)
