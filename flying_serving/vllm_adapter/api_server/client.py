"""The start of engines by vLLM's API server, and its requests that an engine client refuses."""

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.platforms import current_platform

from flying_serving.config import KEY
from flying_serving.errors import ConfigError
from flying_serving.start_error import start_error
from flying_serving.vllm_adapter.assigned import assigned
from flying_serving.vllm_adapter.patches.engine_class import engine_classes

_starting: ContextVar[str | None] = ContextVar("starting", default=None)
"""Run directory of the server that starts its engines."""


@contextmanager
def starting(run_dir: str, engine_class: Any) -> Iterator[None]:
    """While the body runs, engines that vLLM starts are of this class, in processes of this
    server.
    """
    with assigned(_starting, run_dir), engine_classes(engine_class):
        yield


def fork_on_cpu(original: Any) -> Any:
    """Wrap `get_mp_context` where engine processes are started."""
    if not _starting.get() or not current_platform.is_cpu():
        return original()
    gc.collect()
    gc.freeze()
    return multiprocessing.get_context("fork")


def start_independent(
    original: Any,
    handshake_socket: Any,
    core_engines: Any,
    parallel_config: Any,
    coordinated_dp: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `wait_for_engine_startup`: no engine gets the parallel configuration of a coordinated
    group.

    Raises:
        ConfigError: in one line, if an engine of ours said why it cannot start.
    """
    run_dir = _starting.get()
    try:
        original(
            handshake_socket,
            core_engines,
            parallel_config,
            coordinated_dp and not run_dir,
            *args,
            **kwargs,
        )
    except RuntimeError:
        reason = None if run_dir is None else start_error(run_dir)
        if reason is None:
            raise
        raise ConfigError(reason) from None


def without_coordinator(original: Any, self: Any) -> bool:
    """Wrap `VllmConfig.needs_dp_coordinator`: our client knows each engine's load itself."""
    return KEY not in (self.additional_config or {}) and bool(original(self))


async def abort_if_refused(
    original: Any, self: Any, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap `AsyncLLM._add_request`, which has given a request to the output processor when the
    client gets it.

    If the engine client refuses the request, or its HTTP client leaves while it waits there, it is
    forgotten everywhere.
    """
    try:
        await original(self, request, *args, **kwargs)
    except BaseException:
        await self.abort(request.request_id, internal=True)
        raise
