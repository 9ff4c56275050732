"""Adapters (LoRA) that are loaded while the server runs: on every engine, or on none."""

import asyncio
from typing import Any

from flying_serving.errors import EngineLost
from flying_serving.server.calls.engine_calls import EngineCalls


async def add_everywhere(calls: EngineCalls, adapter: Any) -> bool:
    """Have each present engine load an adapter (vLLM's LoRARequest), between two of its steps.

    An engine that is lost meanwhile does not count: it loads adapters with the first request for
    them.

    Raises:
        Exception: the first engine's error, when no engine has the adapter any more.
        EngineLost: if no engine has answered.
    """
    answers = await _ask_all(calls, "add_lora", adapter)
    lost = [answer for answer in answers if isinstance(answer, EngineLost)]
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    failures = [error for error in errors if not isinstance(error, EngineLost)]
    if failures:
        await _ask_all(calls, "remove_lora", adapter.lora_int_id)
        raise failures[0]
    if len(lost) == len(answers):
        raise lost[0]
    return all(answer for answer in answers if not isinstance(answer, EngineLost))


async def _ask_all(calls: EngineCalls, method: str, argument: Any) -> list[Any]:
    """Return the answer of each present engine, or the error of its call."""
    waiting = [_ask(calls, engine, method, argument) for engine in calls.engines]
    return await asyncio.gather(*waiting, return_exceptions=True)


async def _ask(calls: EngineCalls, engine: int, method: str, argument: Any) -> Any:
    # no deadline: an engine that hangs is killed, and its call ends
    return (await calls.call(engine, method, (argument,)))[1]
