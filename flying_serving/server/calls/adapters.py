"""Adapters (LoRA) that are loaded while the server runs: on every engine, or on none."""

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from flying_serving.errors import AdapterNotLoaded, EngineLost
from flying_serving.log import logger
from flying_serving.server.calls.engine_calls import EngineCalls
from flying_serving.server.own_thread import SlowReads
from flying_serving.vllm_adapter.lora.files import copied
from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from flying_serving.vllm_adapter.lora.numbers import why_not_finite

READ_DEADLINE_S = 120.0
"""How long it may take to fetch and read an adapter's files, before engines load them."""
READERS = 2
"""Adapters whose files are read at a time."""


class AdapterLoads:
    """The adapters that one server loads. `lora`: vLLM's LoRAConfig; None if the server serves no
    adapters.
    """

    def __init__(self, calls: EngineCalls, lora: Any) -> None:
        self._calls = calls
        self._dtype: torch.dtype | None = None if lora is None else lora.lora_dtype
        self._reads = SlowReads(READERS)

    async def add_everywhere(self, adapter: Any, deadline_s: float | None = None) -> bool:
        """Have each present engine load an adapter (vLLM's LoRARequest), between two of its steps.

        An engine that loads lets its groups wait. So its files are fetched and read here before.
        They are noted for all engines: an engine that finds others does not load them.

        An engine that is lost meanwhile does not count: it loads adapters with the first request
        for them. If another engine fails or is overdue, each present engine removes the adapter. An
        overdue engine is told to, and is not waited for. An engine that does not remove it is
        logged.

        `deadline_s`: by default --collective-timeout-s, after which the members of a group no
        longer wait for an engine.

        Raises:
            AdapterNotLoaded: if an engine does not answer within `deadline_s`, or the files are not
                read within READ_DEADLINE_S, or cannot be used.
            EngineLost: if no engine is present, or if no engine has answered.
            Exception: the first engine's own error, or that of the read.
        """
        calls = self._calls
        if deadline_s is None:
            deadline_s = calls.deployment.flying.collective_timeout_s
        await self._read(adapter)
        engines = calls.engines
        loads = [_load(calls, engine, adapter, deadline_s) for engine in engines]
        answers = dict(
            zip(engines, await asyncio.gather(*loads, return_exceptions=True), strict=True)
        )
        losses = [answer for answer in answers.values() if isinstance(answer, EngineLost)]
        present = {
            engine: answer
            for engine, answer in answers.items()
            if not isinstance(answer, EngineLost)
        }

        failures = [answer for answer in present.values() if isinstance(answer, BaseException)]
        if failures:
            overdue = {
                engine for engine, answer in present.items() if isinstance(answer, AdapterNotLoaded)
            }
            await _remove_everywhere(calls, adapter, overdue, deadline_s)
            raise failures[0]
        if not present:
            raise next(
                iter(losses),
                EngineLost(f"no engine is present to load adapter {adapter.lora_name!r}"),
            )
        return all(present.values())

    async def _read(self, adapter: Any) -> None:
        """Read and check an adapter's files, so that engines find them in memory, and note which
        they are.

        Raises:
            AdapterNotLoaded: if they are not read in time, or as `read_files`.
            Exception: as `read_files`.
        """
        run_dir = self._calls.deployment.run_dir
        read = partial(read_files, adapter, run_dir, self._dtype)
        try:
            digest = await self._reads.run(read, READ_DEADLINE_S)
        except TimeoutError:
            raise AdapterNotLoaded(
                f"the files of adapter {adapter.lora_name!r} were not read within "
                f"{READ_DEADLINE_S:g} s"
            ) from None
        AdapterNotes(run_dir).expect(adapter.lora_int_id, digest)


def read_files(
    adapter: Any, run_dir: str, dtype: torch.dtype | None, stopped: Callable[[], bool]
) -> str:
    """Read the files of an adapter, which are fetched first if a hub has them. Returns their
    digest.

    `stopped`: as of `copied`.

    Raises:
        AdapterNotLoaded: as `copied`, or if a number is not finite: naming file, tensor and value.
        Exception: as `copied`.
    """
    with copied(adapter, run_dir, stopped) as files:
        why = None if dtype is None else why_not_finite(files, dtype, stopped)
        if why is not None:
            raise AdapterNotLoaded(f"adapter {adapter.lora_name!r}: {why}")
        return files.digest


def refusal_of_reload(request: Any) -> ErrorResponse | None:
    """Return the answer (400) to a call of /v1/load_lora_adapter with `load_inplace`; None to
    another.

    Engines load an adapter between steps of their own. So members of a group could compute a step
    with different weights of one adapter.
    """
    if not request.load_inplace:
        return None
    return create_error_response(
        VLLMValidationError(
            "load_inplace: cannot be served by Flying Serving yet; load the adapter under another "
            "name",
            parameter="load_inplace",
        )
    )


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
