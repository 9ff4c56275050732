"""Adapters (LoRA) that are loaded while the server runs: on every engine, or on none."""

import asyncio
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import AdapterNotLoaded, EngineLost
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls

READ_DEADLINE_S = 120.0
"""How long it may take to fetch and read an adapter's files, before engines load them."""
_PIECE_BYTES = 2**24


async def add_everywhere(calls: EngineCalls, adapter: Any, deadline_s: float | None = None) -> bool:
    """Have each present engine load an adapter (vLLM's LoRARequest), between two of its steps.

    An engine that loads lets its groups wait. So its files are fetched and read here before.

    An engine that is lost meanwhile does not count: it loads adapters with the first request for
    them. If another engine fails or is overdue, each present engine removes the adapter. An overdue
    engine is told to, and is not waited for. An engine that does not remove it is logged.

    `deadline_s`: by default --collective-timeout-s, after which the members of a group no longer
    wait for an engine.

    Raises:
        AdapterNotLoaded: if an engine does not answer within `deadline_s`, or the files are not
            read within READ_DEADLINE_S.
        EngineLost: if no engine is present, or if no engine has answered.
        Exception: the first engine's own error.
    """
    if deadline_s is None:
        deadline_s = calls.deployment.flying.collective_timeout_s
    await _read(adapter)
    engines = calls.engines
    loads = [_load(calls, engine, adapter, deadline_s) for engine in engines]
    answers = dict(zip(engines, await asyncio.gather(*loads, return_exceptions=True), strict=True))
    losses = [answer for answer in answers.values() if isinstance(answer, EngineLost)]
    present = {
        engine: answer for engine, answer in answers.items() if not isinstance(answer, EngineLost)
    }

    failures = [answer for answer in present.values() if isinstance(answer, BaseException)]
    if failures:
        overdue = {
            engine for engine, answer in present.items() if isinstance(answer, AdapterNotLoaded)
        }
        await _remove_everywhere(calls, adapter, overdue, deadline_s)
        raise failures[0]
    if not present:
        absent = EngineLost(f"no engine is present to load adapter {adapter.lora_name!r}")
        raise next(iter(losses), absent)
    return all(present.values())


async def _read(adapter: Any) -> None:
    """Read an adapter's files, so that engines find them in memory. Raises AdapterNotLoaded."""
    try:
        await asyncio.wait_for(asyncio.to_thread(read_files, adapter.lora_path), READ_DEADLINE_S)
    except TimeoutError:
        raise AdapterNotLoaded(
            f"the files of adapter {adapter.lora_name!r} were not read within {READ_DEADLINE_S:g} s"
        ) from None


def read_files(path: str) -> int:
    """Read the files of an adapter, which are fetched first if a hub has them. Returns their bytes.

    `path`: as in a request to load it. Problems with it are left to the engines, which name them.
    """
    size = 0
    with suppress(Exception):
        folder = Path(get_adapter_absolute_path(path))
        for file in sorted(entry for entry in folder.iterdir() if entry.is_file()):
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    size += len(piece)
    return size


async def _load(calls: EngineCalls, engine: int, adapter: Any, deadline_s: float) -> Any:
    """Return an engine's answer. Raises as `add_everywhere`, and the engine's own error."""
    try:
        answer = await asyncio.wait_for(calls.call(engine, "add_lora", (adapter,)), deadline_s)
    except TimeoutError:
        raise AdapterNotLoaded(
            f"engine {engine} did not load adapter {adapter.lora_name!r} within {deadline_s:g} s"
        ) from None
    return answer[1]


async def _remove_everywhere(
    calls: EngineCalls, adapter: Any, overdue: AbstractSet[int], deadline_s: float
) -> None:
    """Have each present engine remove an adapter; wait for the engines that are not overdue."""
    removals = {engine: _remove(calls, engine, adapter, deadline_s) for engine in calls.engines}
    for engine in overdue & removals.keys():
        calls.run_in_background(removals.pop(engine))
    await asyncio.gather(*removals.values())


async def _remove(calls: EngineCalls, engine: int, adapter: Any, deadline_s: float) -> None:
    """Have an engine remove an adapter. A failure is logged, unless the engine has ended."""
    try:
        await asyncio.wait_for(
            calls.call(engine, "remove_lora", (adapter.lora_int_id,)), deadline_s
        )
    except (EngineLost, EngineDeadError):
        return
    except TimeoutError:
        problem = f"it did not remove the adapter within {deadline_s:g} s"
    except Exception as error:  # noqa: BLE001 - every failure is logged
        problem = str(error)
    else:
        return
    logger.error("engine %d may still have adapter %r: %s", engine, adapter.lora_name, problem)
