"""Where vLLM's API server is told to use our client, our engine processes and our routes."""

from __future__ import annotations

import gc
import multiprocessing
from contextvars import ContextVar
from typing import Any

from vllm.platforms import current_platform

from flying_serving.config import KEY, deployment_of
from flying_serving.errors import ConfigError
from flying_serving.start_error import start_error
from flying_serving.vllm_hooks import table
from flying_serving.vllm_hooks.engines import engine_classes

_starting: ContextVar[str | None] = ContextVar("starting", default=None)
"""Run directory of the server whose engines are being started."""


def make_client(
    original: Any,
    vllm_config: Any,
    executor_class: Any,
    log_stats: bool,
    client_addresses: dict[str, Any] | None = None,
    client_count: int = 1,
    client_index: int = 0,
    renderer: Any = None,
) -> Any:
    """Wraps `EngineCoreClient.make_async_mp_client`: our client if `additional_config` has our key."""
    if KEY not in (vllm_config.additional_config or {}):
        return original(vllm_config, executor_class, log_stats, client_addresses, client_count, client_index, renderer)
    table.install(table.PATCHES)
    table.install(table.SERVER_PATCHES)
    from flying_serving.engine.core import FlyingEngineCore
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.interrupt import ended_by_signals
    from flying_serving.server.launch import prepare

    executor_class = prepare(vllm_config, client_count)
    run_dir = deployment_of(vllm_config.additional_config).run_dir
    token = _starting.set(run_dir)
    try:
        with engine_classes(FlyingEngineCore), ended_by_signals(run_dir):
            return FlyingClient(vllm_config, executor_class, log_stats, renderer=renderer)
    finally:
        _starting.reset(token)


def fork_on_cpu(original: Any) -> Any:
    """Wraps `get_mp_context` where engine processes are started."""
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
    cache_config: Any,
    launch: Any,
) -> None:
    """Wraps `wait_for_engine_startup`: no engine gets the parallel configuration of a coordinated group.

    Raises:
        ConfigError: in one line, if an engine of ours said why it cannot start.
    """
    run_dir = _starting.get()
    try:
        original(handshake_socket, core_engines, parallel_config, coordinated_dp and not run_dir, cache_config, launch)
    except RuntimeError:
        reason = None if run_dir is None else start_error(run_dir)
        if reason is None:
            raise
        raise ConfigError(reason) from None


def without_coordinator(original: Any, self: Any) -> bool:
    """Wraps `VllmConfig.needs_dp_coordinator`: our client knows each engine's load itself."""
    return KEY not in (self.additional_config or {}) and bool(original(self))


def check_before_stream(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `AsyncLLM.generate`, a generator that begins when its first output is wanted: in a stream, after HTTP 200.

    Raises:
        VLLMValidationError: before that, if no layout of this server can run the request, or it cannot be sent.
        GracefulHTTPError: if too many wait.
    """
    from flying_serving.server.client import FlyingClient

    given = dict(zip(("self", "prompt", "sampling_params", "request_id"), args, strict=False)) | kwargs
    client, prompt = given["self"].engine_core, given["prompt"]
    if isinstance(client, FlyingClient) and isinstance(prompt, dict):  # else it is not tokens yet
        of_prompt = {name: prompt.get(name) for name in ("prompt_token_ids", "prompt_embeds", "cache_salt")}
        others = {name: value for name, value in given.items() if name not in ("self", "prompt", "prompt_text")}
        client.check({"priority": 0} | of_prompt | others)
    return original(*args, **kwargs)


async def abort_if_refused(
    original: Any, self: Any, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any
) -> None:
    """Wraps `AsyncLLM._add_request`, which has given a request to the output processor when the client gets it.

    If the engine client refuses it, or its HTTP client leaves while it waits there, it is forgotten everywhere.
    """
    try:
        await original(self, request, prompt, parent_req, index, queue)
    except BaseException:
        await self.abort(request.request_id, internal=True)
        raise


def end_in_order(original: Any, self: Any, timeout: float | None = None) -> None:
    """Wraps `AsyncLLM.shutdown`: requests may end within the timeout, and get an answer before the engines are gone."""
    from flying_serving.server.client import FlyingClient

    client = getattr(self, "engine_core", None)
    if isinstance(client, FlyingClient):
        timeout = client.end(timeout, self.output_processor)
    original(self, timeout)


def add_routes(original: Any, app: Any, supported_tasks: Any) -> None:
    """Wraps `attach_endpoint_plugins`, which vLLM calls after its own routes and before its middleware."""
    original(app, supported_tasks)
    from flying_serving.server import routes, view

    routes.attach(app, app.state.args)
    view.attach(app)
