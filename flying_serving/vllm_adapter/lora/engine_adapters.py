"""The adapters (LoRA) of an engine: every engine has the same bytes of each, or does without it for
a step.
"""

import time
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import msgspec
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from flying_serving.errors import AdapterNotLoaded
from flying_serving.log import logger
from flying_serving.vllm_adapter.lora.files import copied
from flying_serving.vllm_adapter.lora.notes import AdapterNotes
from flying_serving.vllm_adapter.lora.numbers import why_loaded_not_finite

RETRY_S = 5.0
"""Seconds after which an adapter that could not be read is read again, if a step needs it."""


class EngineAdapters:
    """The `lora_manager` of lane 1's runner: vLLM's, which loads verified copies of files.

    vLLM reads the folder of an adapter again when a step needs one that was evicted, or in an
    engine that was started again. A folder may have changed or gone by then, and an error in a step
    would end the engine. Here the step is made without such an adapter, and a note says so. The
    leader of the group sees it when the step ends, ends the requests of the adapter, and gives out
    no token of theirs: see `AdapterScheduler`.

    Args:
        manager: vLLM's.
        run_dir: of the server.
        engine: the number of this engine.
        clock: CLOCK_MONOTONIC, in seconds.
    """

    def __init__(
        self,
        manager: WorkerLoRAManager,
        run_dir: str,
        engine: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._run_dir = run_dir
        self._engine = engine
        self._notes = AdapterNotes(run_dir)
        self._clock = clock
        self._failures: dict[int, tuple[float, str]] = {}
        """By adapter: when it could not be read, and why."""

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":
            raise AttributeError(name)
        return getattr(self._manager, name)

    def add_adapter(self, adapter: LoRARequest) -> bool:
        """Load an adapter as vLLM does, if it is not there, from a copy of its files.

        Raises:
            AdapterNotLoaded: if the files are not those that the first engine, or the server, has
                read; if a number is not finite; or as `copied`.
            Exception: vLLM's own error, or as `copied`.
        """
        if adapter.lora_int_id in self._manager.list_adapters() and not adapter.load_inplace:
            return bool(self._manager.add_adapter(adapter))  # it becomes the last to be evicted
        with copied(adapter, self._run_dir) as files:
            if self._notes.agree(adapter.lora_int_id, files.digest) != files.digest:
                raise AdapterNotLoaded(
                    f"the files of adapter {adapter.lora_name!r} have changed since it was loaded: "
                    "unload it, and load it again"
                )
            folder = str(files.folder)
            copy = msgspec.structs.replace(adapter, lora_path=folder)
            try:
                loaded = bool(self._manager.add_adapter(copy))
            except LoRAAdapterNotFoundError:
                raise LoRAAdapterNotFoundError(adapter.lora_name, adapter.lora_path) from None
            except ValueError as error:
                raise ValueError(str(error).replace(folder, adapter.lora_path)) from error
        model = self._manager._adapter_manager.get_adapter(adapter.lora_int_id)
        why = why_loaded_not_finite(model, files.weights)
        if why is not None:
            self._manager.remove_adapter(adapter.lora_int_id)
            raise AdapterNotLoaded(f"adapter {adapter.lora_name!r}: {why}")
        return loaded

    def set_active_adapters(
        self, adapters: Collection[LoRARequest], mapping: LoRAMapping | None
    ) -> None:
        """Load the adapters of a step of lane 1, and say which slot each of its tokens uses."""
        missing = self.load(adapters)
        if mapping is not None:
            self._manager._adapter_manager.set_adapter_mapping(without(mapping, missing))

    def load(self, adapters: Collection[LoRARequest]) -> frozenset[int]:
        """Load the adapters of a step, where they have no slot. Returns those that could not be
        loaded, which are noted.
        """
        here = self._manager.list_adapters()
        # those that are here first: loading another one must not evict them
        in_order = sorted(adapters, key=lambda adapter: adapter.lora_int_id not in here)
        return frozenset(
            adapter.lora_int_id for adapter in in_order if not self._try_to_load(adapter)
        )

    def _try_to_load(self, adapter: LoRARequest) -> bool:
        failed_s, why = self._failures.get(adapter.lora_int_id, (0.0, ""))
        if not why or self._clock() - failed_s > RETRY_S:
            try:
                self.add_adapter(adapter)
            except Exception as error:  # noqa: BLE001 - after any error the other requests go on
                why = self._why(adapter, error)
                self._failures[adapter.lora_int_id] = self._clock(), why
                logger.error("%s", why)
            else:
                self._failures.pop(adapter.lora_int_id, None)
                return True
        self._notes.failed(adapter.lora_int_id, self._engine, why, self._clock())
        return False

    def _why(self, adapter: LoRARequest, error: Exception) -> str:
        if isinstance(error, AdapterNotLoaded):
            return str(error)
        return (
            f"engine {self._engine} cannot read adapter {adapter.lora_name!r} again: "
            f"{type(error).__name__}: {error}"
        )


def without(mapping: LoRAMapping, missing: AbstractSet[int]) -> LoRAMapping:
    """Return the adapters of a step's tokens without the missing ones: such tokens have none."""
    if not missing:
        return mapping
    return replace(
        mapping,
        index_mapping=_left(mapping.index_mapping, missing),
        prompt_mapping=_left(mapping.prompt_mapping, missing),
    )


def _left(adapters: tuple[int, ...], missing: AbstractSet[int]) -> tuple[int, ...]:
    return tuple(0 if adapter in missing else adapter for adapter in adapters)
