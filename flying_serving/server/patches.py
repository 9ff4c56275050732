"""Wrappers of functions that vLLM's API server calls: our client, our checks, our routes.
`installer.install` installs them.

Imports are inside: vLLM loads its plugins, and so this module, in every process.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from flying_serving.config import KEY, deployment_of
from flying_serving.vllm_adapter.patches import installer, table


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
    """Wrap `EngineCoreClient.make_async_mp_client`: return our client if `additional_config` has
    our key.
    """
    if KEY not in (vllm_config.additional_config or {}):
        return original(
            vllm_config,
            executor_class,
            log_stats,
            client_addresses,
            client_count,
            client_index,
            renderer,
        )
    installer.install(table.PATCHES)
    installer.install(table.SERVER_PATCHES, HOOKS)
    from flying_serving.engine.core import FlyingEngineCore
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.start.environment import workers_place_themselves
    from flying_serving.server.start.interrupts import ended_by_signals
    from flying_serving.server.start.launch import prepare
    from flying_serving.vllm_adapter.api_server.client import starting

    executor_class = prepare(vllm_config, client_count)
    run_dir = deployment_of(vllm_config.additional_config).run_dir
    with (
        starting(run_dir, FlyingEngineCore),
        ended_by_signals(run_dir),
        workers_place_themselves(os.environ),
    ):
        return FlyingClient(vllm_config, executor_class, log_stats, renderer=renderer)


def check_before_stream(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `AsyncLLM.generate`, a generator that begins when its first output is wanted: in a
    stream, after HTTP 200.

    Raises:
        VLLMValidationError: before that, if no layout of this server can run the request, or it
            cannot be sent.
        GracefulHTTPError: if too many wait.
    """
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.requests.checks import fields_of
    from flying_serving.server.requests.origin import own_priority

    given = (
        dict(zip(("self", "prompt", "sampling_params", "request_id"), args, strict=False)) | kwargs
    )
    client, prompt = given["self"].engine_core, given["prompt"]
    if isinstance(client, FlyingClient) and "priority" in kwargs:
        kwargs["priority"] = given["priority"] = own_priority(kwargs["priority"])
    generator = original(*args, **kwargs)
    if isinstance(client, FlyingClient):
        client.shell.calls.channel.outputs = given["self"].output_processor
        if isinstance(prompt, dict):  # any other prompt is not tokens yet
            client.shell.checks.let_in(given["request_id"], fields_of(given, prompt), generator)
    return generator


async def check_prompts(original: Any, self: Any, request: Any) -> Any:
    """Wrap `OpenAIServingCompletion.render_completion_request`, which returns the prompts of a call
    before `generate` is called for each.

    Raises:
        VLLMValidationError: if it has more of them than are ever let in together.
    """
    rendered = await original(self, request)
    if isinstance(rendered, list):  # otherwise it is vLLM's refusal
        _check_prompts(self, "prompt", rendered, request.n or 1)
    return rendered


async def check_conversations(original: Any, self: Any, request: Any) -> Any:
    """Wrap `OpenAIServingChatBatch.render_batch_chat_request`: as `check_prompts`."""
    rendered = await original(self, request)
    if isinstance(rendered, tuple):
        _check_prompts(self, "messages", rendered[2], request.n or 1)
    return rendered


async def check_inputs(original: Any, self: Any, ctx: Any) -> None:
    """Wrap `PoolingBaseServing._prepare_generators`: as `check_prompts`."""
    prompts = [given["prompts"] for given in ctx.engine_inputs or ()]
    fields = ("input", "documents", "items", "data_2", "text_2", "texts", "inputs", "messages")
    field = next((name for name in fields if getattr(ctx.request, name, None)), "input")
    _check_prompts(self, field, prompts)
    await original(self, ctx)


def _check_prompts(serving: Any, field: str, prompts: list[Any], n: int = 1) -> None:
    from flying_serving.server.client import FlyingClient

    client = serving.engine_client.engine_core
    if isinstance(client, FlyingClient):
        client.shell.checks.check_prompts(field, prompts, n)


def check_response(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `OpenAIServingResponses._generate_with_builtin_tools`, which calls `generate` in its
    stream.

    Raises: as `check_before_stream`.
    """
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.requests.checks import fields_of
    from flying_serving.server.requests.origin import note_priority

    given = (
        dict(zip(("request_id", "engine_input", "sampling_params"), args, strict=False)) | kwargs
    )
    client, prompt = self.engine_client.engine_core, given["engine_input"]
    generator = original(self, *args, **kwargs)
    if isinstance(client, FlyingClient):
        first_call = f"{given['request_id']}_0"
        named = ("request_id", "sampling_params", "priority", "lora_request")
        fields = fields_of({name: given[name] for name in named if name in given}, prompt)
        note_priority(fields["priority"])
        client.shell.checks.let_in_ahead(first_call, fields, generator)
    return generator


def end_by_event(original: Any, generator: Any) -> Any:
    """Wrap `_convert_stream_to_sse_events` of /v1/responses: see `ended_by_event`."""
    from flying_serving.server.http.refusals import ended_by_event

    return ended_by_event(original(generator))


async def refuse_reload(original: Any, self: Any, request: Any) -> Any:
    """Wrap `OpenAIServingModels._check_load_lora_adapter_request`: return vLLM's answer to a call
    that it refuses, ours to `load_inplace`, and None to a call that loads an adapter.
    """
    from flying_serving.server.calls.adapters import refusal_of_reload

    return await original(self, request) or refusal_of_reload(request)


def end_in_order(original: Any, self: Any, timeout: float | None = None) -> None:
    """Wrap `AsyncLLM.shutdown`: requests may end within the timeout, and get an answer before the
    engines are gone.

    Raises:
        TooFewEngines: once, at the end, if too few engines are the reason.
    """
    from flying_serving.server.client import FlyingClient

    client = getattr(self, "engine_core", None)
    if isinstance(client, FlyingClient):
        timeout = client.end(timeout, self.output_processor)
    original(self, timeout)
    if isinstance(client, FlyingClient) and client.too_few is not None:
        error, client.too_few = client.too_few, None
        raise error


def add_routes(original: Any, app: Any, supported_tasks: Any) -> None:
    """Wrap `attach_endpoint_plugins`, which vLLM calls after its own routes and before its
    middleware.
    """
    original(app, supported_tasks)
    from flying_serving.server.http import application

    application.attach(app, app.state.args)


def tell_rights(original: Any, engine_client: Any, state: Any, args: Any) -> Any:
    """Wrap `init_endpoint_plugins_state`, where vLLM first has both: the engines hear whether an
    API key is set.
    """
    from flying_serving.server.client import FlyingClient
    from flying_serving.server.http.app_state import keys_in

    client = getattr(engine_client, "engine_core", None)
    if isinstance(client, FlyingClient):
        client.shell.checks.rights.has_key = bool(keys_in(state))
    return original(engine_client, state, args)


HOOKS: Mapping[str, Callable[..., Any]] = {
    hook.__name__: hook
    for hook in (
        make_client,
        check_before_stream,
        check_prompts,
        check_conversations,
        check_inputs,
        check_response,
        end_by_event,
        refuse_reload,
        end_in_order,
        add_routes,
        tell_rights,
    )
}
