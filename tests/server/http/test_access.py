"""Who may use the admin routes: with an API key those who have it, without one this machine's
programs alone.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException
from starlette.routing import Mount, Route, WebSocketRoute
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.server.http.access import FORWARDED, OPEN, READING, check_key, is_local
from flying_serving.server.http.incoming import Incoming, generates
from flying_serving.server.patches import HOOKS
from flying_serving.vllm_adapter.patches import installer, table
from harness.live import Server
from tests.server.apps import SECRET, app
from tests.server.test_lifecycle import Parts

KEY = {"Authorization": f"Bearer {SECRET}"}
KEY_BYTES = f"Bearer {SECRET}".encode()
HERE = ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
ELSEWHERE = (
    "10.0.0.7",
    "0.0.0.0",
    "::",
    "fe80::1%eth0",
    "::ffff:10.0.0.7",
    "2001:db8::7",
    "localhost.example",
    "",
)
PATHS = ("/flying/switches", "/flying/")
ROUTES = (
    ("GET", "/flying/status"),
    ("POST", "/flying/layout"),
    ("DELETE", "/flying/layout"),
    ("GET", "/flying/switches"),
    ("POST", "/flying/check"),
    ("GET", "/flying/drain"),
    ("POST", "/flying/drain"),
    ("DELETE", "/flying/drain"),
    ("GET", "/flying/view"),
    ("GET", "/flying/"),
)
ALONE = "without an API key (--api-key, VLLM_API_KEY) the admin routes answer this machine alone"
NO_KEY_SET = "without an API key (--api-key, VLLM_API_KEY) the admin routes"
NOT_OUR_NAME = f"{NO_KEY_SET} answer to localhost, loopback addresses and --host alone"
NO_PAGES = (
    "without an API key (--api-key, VLLM_API_KEY) the admin routes answer no pages of other sites"
)


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


async def ask(
    made: FastAPI,
    peer: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
) -> httpx.Response:
    """The answer to a request of this peer."""
    transport = httpx.ASGITransport(made, client=(peer, 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        return await client.request(method, path, headers=dict(headers or {}))


def message(answer: httpx.Response) -> str:
    """What a refusal says."""
    assert answer.status_code == 403, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("peer", HERE)
@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_this_machine_is_answered(peer: str, path: str) -> None:
    assert (await ask(app(keys=()), peer, path)).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_key_no_other_machine_is_answered(method: str, path: str) -> None:
    """On no route, the page included."""
    assert message(await ask(app(keys=()), "10.0.0.7", path, method=method)) == ALONE


@pytest.mark.parametrize("peer", ELSEWHERE)
async def test_every_address_of_others_is_refused(peer: str) -> None:
    assert message(await ask(app(keys=[""]), peer, "/flying/switches")) == ALONE


@pytest.mark.parametrize("name", FORWARDED)
@pytest.mark.parametrize("value", ["10.0.0.7", "127.0.0.1", ""])
async def test_what_a_proxy_here_forwards_is_not_local(name: str, value: str) -> None:
    """Whatever the header claims."""
    assert message(await ask(app(keys=()), "127.0.0.1", "/flying/switches", {name: value})) == ALONE


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://[", "http://10.0.0.7:8000", "", "file://"]
)
async def test_pages_of_other_sites_are_refused_in_a_browser_here(origin: str) -> None:
    """vLLM lets pages of all sites ask by default (CORS), and a name of theirs may have our
    address.
    """
    assert (
        message(await ask(app(keys=()), "127.0.0.1", "/flying/switches", {"Origin": origin}))
        == NO_PAGES
    )


@pytest.mark.parametrize(
    "origin", ["http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"]
)
async def test_our_own_page_is_answered(origin: str) -> None:
    assert (
        await ask(app(keys=()), "127.0.0.1", "/flying/switches", {"Origin": origin})
    ).status_code == 200


@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.7"])
@pytest.mark.parametrize(
    "headers", [{}, {"X-Forwarded-For": "10.0.0.8"}, {"Origin": "http://a.example"}]
)
async def test_with_a_key_who_has_it_is_answered_wherever_it_is(
    peer: str, headers: dict[str, str]
) -> None:
    """And who has not is not, on this machine either; but the page, which asks for the key,
    opens.
    """
    made = app()
    assert (await ask(made, peer, "/flying/switches", KEY | headers)).status_code == 200
    assert (await ask(made, peer, "/flying/switches", headers)).status_code == 401
    assert (await ask(made, peer, "/flying/", headers)).status_code == 200


@pytest.mark.parametrize(
    ("scope", "local"),
    [
        ({"client": None, "server": ("/run/socket", None)}, True),
        ({"client": None, "server": ("10.0.0.1", 8000)}, False),
        ({"client": None}, False),
        ({"client": ("127.0.0.1", 1), "server": None}, True),
    ],
    ids=["unix socket", "reset before it was looked at", "unknown", "server unknown"],
)
def test_an_unknown_peer_is_local_on_a_unix_socket_alone(
    scope: dict[str, Any], local: bool
) -> None:
    assert is_local(scope, {}) is local
    assert not is_local(scope, {"x-forwarded-for": "127.0.0.1"})


@asynccontextmanager
async def served(listening: socket.socket, **options: Any) -> AsyncIterator[None]:
    """uvicorn serves an app without a key on this socket."""
    server = uvicorn.Server(
        uvicorn.Config(app(keys=()), log_config=None, lifespan="off", **options)
    )
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await running


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "10.0.0.7", "127.0.0.1.evil.example", "localhost.evil", ""]
)
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_name_of_another_site_with_our_address_is_refused(
    method: str, path: str, host: str
) -> None:
    """DNS rebinding: to a browser here the page and its answers are of one site, so a GET has no
    Origin.
    """
    answer = await ask(app(keys=()), "127.0.0.1", path, {"Host": host}, method)
    assert message(answer) == f"Host={host!r}: {NOT_OUR_NAME}"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:80", "127.8.8.8", "[::1]:80"]
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_name_of_this_machine_is_answered(path: str, host: str) -> None:
    assert (await ask(app(keys=()), "127.0.0.1", path, {"Host": host})).status_code == 200


async def test_the_name_that_the_server_is_bound_to_is_answered() -> None:
    made = app(keys=())
    made.state.args.host = "workstation"
    assert (
        await ask(made, "127.0.0.1", "/flying/switches", {"Host": "workstation:8000"})
    ).status_code == 200
    assert (
        await ask(made, "127.0.0.1", "/flying/switches", {"Host": "other:8000"})
    ).status_code == 403


async def test_with_a_key_every_name_is_answered() -> None:
    answer = await ask(app(), "10.0.0.7", "/flying/switches", KEY | {"Host": "node-1.example"})
    assert answer.status_code == 200


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
        yield build_app(args, ("generate", "render", "transcription", "realtime"), None)
    installer.uninstall()


def changing(made: FastAPI) -> set[tuple[str, str]]:
    """Method and path of every route that does not only read."""
    found: set[tuple[str, str]] = set()
    for route in made.routes:
        if isinstance(
            route, Mount
        ):  # prometheus_client's application, which reads whatever the method is
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
    found = {path for path in paths if generates({"type": "http", "method": "POST", "path": path})}
    assert found == GENERATE


async def answered(made: FastAPI, method: str, path: str, headers: Mapping[str, str]) -> int:
    """The status of the answer to a request without a body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

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


@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring", "/collective_rpc", *OPEN])
@pytest.mark.parametrize("keys", [(SECRET,), ()], ids=["with a key", "without"])
async def test_who_has_the_key_or_needs_none_gets_to_the_route(
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


async def test_a_unix_socket_is_local(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    async with served(listening):
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            assert (await client.get("/flying/switches")).status_code == 200


async def test_a_header_that_uvicorn_believes_makes_nobody_local() -> None:
    """`FORWARDED_ALLOW_IPS=*`: the address that the app sees is the header's."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/flying/switches"
    async with served(listening, forwarded_allow_ips="*"), httpx.AsyncClient() as client:
        assert (await client.get(url)).status_code == 200
        assert message(await client.get(url, headers={"X-Forwarded-For": "127.0.0.1"})) == ALONE


@pytest.mark.server
def test_engines_are_reached_by_the_servers_user_alone(small_engines: Server) -> None:
    """Their pickled messages go by sockets in a directory with mode 0700; torch's TCP ports are
    this machine's.
    """
    parts = Parts.of(small_engines)
    assert parts.run_dir.stat().st_mode & 0o777 == 0o700
    assert parts.run_dir.stat().st_uid == psutil.Process(small_engines.process.pid).uids().real
    connections = [
        c for process in (*parts.engines, *parts.others) for c in process.net_connections("all")
    ]
    sockets = {Path(c.laddr) for c in connections if c.family == socket.AF_UNIX and c.laddr}
    assert {f"inbox-{engine}" for engine in range(4)} <= {path.name for path in sockets}
    assert {path.parent for path in sockets} == {parts.run_dir}
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
