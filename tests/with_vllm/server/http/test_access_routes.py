"""Every route of vLLM's application: which need the API key, and which generate."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.params import Form
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route, WebSocketRoute
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.server.http.access import OPEN, READING, check_key
from flying_serving.server.http.incoming import Incoming
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table
from tests.with_vllm.server.apps import SECRET
from tests.with_vllm.server.doubles import Server

KEY_BYTES = f"Bearer {SECRET}".encode()
GENERATE = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/invocations",
    "/generative_scoring",
    "/inference/v1/generate",
    # of pooling models
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
}
DO_NOT_GENERATE = {
    "/tokenize",
    "/detokenize",
    "/ping",
    "/v1/responses/{response_id}/cancel",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/abort_requests",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    # of models with audio, which are refused at start
    "/v1/realtime",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    # with VLLM_SERVER_DEV_MODE=1
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/collective_rpc",
    "/sleep",
    "/release_kv_cache_memory",
    "/wake_up",
    "/pause",
    "/resume",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_checker",
    # ours
    "/flying/layout",
    "/flying/check",
    "/flying/drain",
}

READ_BY_THEMSELVES = {
    "/invocations",
    "/inference/v1/abort_requests",
    "/abort_requests",
    "/collective_rpc",
}
"""Routes that parse a body without FastAPI."""

TASKS = ("generate", "render", "transcription", "realtime", "embed", "classify")


@pytest.fixture(scope="module")
def vllms_app() -> Iterator[FastAPI]:
    """vLLM's application with all routes that its flags and variables add, and ours, as they are
    attached to it.
    """
    from vllm.entrypoints.launchers.app import build_app

    installer.uninstall()
    installer.apply(
        tuple(patch for patch in table.SERVER_PATCHES if patch.hook.endswith(":add_routes")), HOOKS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            [f"--api-key={SECRET}", "--enable-scale-out"]
        )
        # as a pooling model: vLLM then adds the routes of embeddings and scores
        model: Any = SimpleNamespace(get_pooling_task=lambda _tasks: "embed")
        yield build_app(args, TASKS, model)
    installer.uninstall()


def changing(made: FastAPI) -> set[tuple[str, str]]:
    """Method and path of every route that does not only read."""
    found: set[tuple[str, str]] = set()
    for route in made.routes:
        # prometheus_client's application, which reads whatever the method is
        if isinstance(route, Mount):
            assert route.path == "/metrics"
            continue
        assert isinstance(route, Route | WebSocketRoute), route
        methods = {"WEBSOCKET"} if isinstance(route, WebSocketRoute) else route.methods or set()
        found |= {(method, route.path) for method in methods - set(READING)}
    return found


def test_every_route_of_vllm_is_known_to_generate_or_not(vllms_app: FastAPI) -> None:
    """A server that is full or drains refuses those that do."""
    paths = {path for _, path in changing(vllms_app)}
    assert paths == GENERATE | DO_NOT_GENERATE
    scope = {"type": "http", "method": "POST", "headers": [], "app": vllms_app}
    asked = {path: Incoming(scope | {"path": path}, unread) for path in paths}
    assert {path for path, request in asked.items() if request.generates} == GENERATE


async def answered(
    made: FastAPI, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
) -> int:
    """The status of the answer to a request, without a body or with this one."""
    sent: list[Any] = []
    parts = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(part: Any) -> None:
        sent.append(part)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    kind = "websocket" if method == "WEBSOCKET" else "http"
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": raw,
        "app": made,
    }
    await made.build_middleware_stack()(scope, receive, send)
    return int(sent[0]["status"])


async def test_every_route_that_does_not_only_read_needs_the_key(vllms_app: FastAPI) -> None:
    """Whether vLLM's own check of the key looks at it or not."""
    asked = changing(vllms_app)
    closed = {(method, path) for method, path in asked if path not in OPEN}
    assert len(closed) > 40
    for method, path in closed:
        assert await answered(vllms_app, method, path, {}) == 401, path
        assert await answered(vllms_app, method, path, {"Authorization": "Bearer wrong"}) == 401, (
            path
        )


async def test_every_route_that_reads_json_refuses_what_its_parser_cannot_nest(
    vllms_app: FastAPI,
) -> None:
    vllms_app.state.engine_client = SimpleNamespace(engine_core=Server())
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    routes = [route for route in vllms_app.routes if isinstance(route, APIRoute)]
    reading = {
        route.path
        for route in routes
        if route.body_field and not isinstance(route.body_field.field_info, Form)
    }
    reading |= READ_BY_THEMSELVES
    assert len(reading) > 25
    for path in reading:
        for text in ("[", '{"a":'):
            body = (text * 100_000).encode()
            assert await answered(vllms_app, "POST", path, headers, body) == 400, path


@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring", "/collective_rpc", *OPEN])
@pytest.mark.parametrize("keys", [(SECRET,), ()], ids=["with a key", "without"])
async def test_request_with_the_key_or_to_an_open_route_is_let_in(
    path: str, keys: tuple[str, ...]
) -> None:
    headers = [(b"authorization", f"Bearer {SECRET}".encode())] if keys and path not in OPEN else []
    owner = SimpleNamespace(state=SimpleNamespace(flying_keys=keys))
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/api{path}",
        "root_path": "/api",
        "headers": headers,
    }
    await check_key(Incoming(scope | {"app": owner}, unread))  # raises nothing


@pytest.mark.parametrize(
    ("headers", "refused"), [([], True), ([(b"authorization", KEY_BYTES)], False)], ids=str
)
async def test_a_websocket_needs_the_key_on_every_path(
    headers: list[tuple[bytes, bytes]], refused: bool
) -> None:
    owner = SimpleNamespace(state=SimpleNamespace(flying_keys=(SECRET,)))
    request = Incoming(
        {"type": "websocket", "path": OPEN[0], "headers": headers, "app": owner}, unread
    )
    with pytest.raises(HTTPException, match="401") if refused else nullcontext():
        await check_key(request)


async def unread() -> Any:
    """In place of the body of a request, which is not looked at."""
    raise AssertionError
