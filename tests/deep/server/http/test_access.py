"""Who may use the admin routes: holders of the API key, or without one this machine's programs."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from fastapi import FastAPI

from flying_serving.server.http.access import FORWARDED, is_local
from harness.live import Server
from tests.deep.server.lifetimes import Parts
from tests.with_vllm.server.apps import SECRET, app

KEY = {"Authorization": f"Bearer {SECRET}"}
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
async def test_request_forwarded_by_a_local_proxy_is_refused(name: str, value: str) -> None:
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
async def test_holder_of_the_key_is_answered_from_any_address(
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


async def test_a_unix_socket_is_local(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    async with served(listening):
        transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "socket"))
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            assert (await client.get("/flying/switches")).status_code == 200


async def test_forwarded_header_that_uvicorn_trusts_is_not_local() -> None:
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
