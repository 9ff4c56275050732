"""The command line of `python -m flying_deploy.vllm_router`."""

import re
import shlex
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flying_deploy.ports import ReservedPort
from flying_deploy.vllm_router.__main__ import check_nodes, reserved_port, without_proxy
from flying_deploy.vllm_router.options import MISSING, SETTINGS, parse
from flying_serving.errors import ConfigError

OURS = [word for setting in SETTINGS.items() for word in setting]
PAGE = Path(__file__).parents[3] / "docs" / "deployment.md"


def test_nodes_of_this_machine_and_others() -> None:
    options = parse(["--port", "80", "--node-url=http://10.0.0.1:8000", "--", "model", "-dp", "2"])
    assert options.nodes == 2
    assert options.node_urls == ("http://10.0.0.1:8000",)
    assert options.url == "http://127.0.0.1:80"
    assert options.serve is not None and options.serve.words == (
        "model",
        "--enable-scale-out",
        "-dp",
        "2",
    )
    assert parse(["--node-url=http://10.0.0.1:8000"]).nodes == 0


def test_the_form_for_three_machines_is_a_command_line() -> None:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = re.findall(r"\.vllm_router (--host .+)$", text, re.M)
    options = parse(shlex.split(line))
    assert options.nodes == 0
    assert options.node_urls == tuple(f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


def test_flags_of_the_router_take_the_place_of_ours() -> None:
    """They follow ours, and so count."""
    asked = [
        "--router-policy",
        "power_of_two",
        "--router-cors-allowed-origins",
        "a",
        "b",
        "--router-cb-failure-threshold=9",
    ]
    options = parse([*asked, "--nodes=3", "--", "model"])
    assert options.nodes == 3
    assert list(options.router[len(OURS) :]) == [word.replace("--router-", "--") for word in asked]
    assert list(options.router[: len(OURS)]) == OURS


@pytest.mark.parametrize("policy", ["power_of_two", "consistent_hash", "round_robin"])
def test_only_routers_that_go_by_tokens_have_them_told(policy: str) -> None:
    serve = parse([f"--router-policy={policy}", "--", "model"]).serve
    assert serve is not None and serve.words == ("model",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "there are no nodes"),
        (
            ["model"],
            "model: unknown; flags of vllm-router begin with --router-, those of nodes follow --",
        ),
        (
            ["--policy", "auto", "--", "m"],
            "--policy: unknown; flags of vllm-router begin with --router-",
        ),
        (["--nodes=2"], "--nodes=2: -- MODEL"),
        (["--nodes=0", "--", "m"], "--nodes=0: there is no node"),
        (["--nodes=65", "--", "m"], "--nodes=65: must be a whole number from 0 up to 64"),
        (["--node-url=10.0.0.1"], "--node-url='10.0.0.1': must be like http://10.0.0.1:8000"),
        (["--node-url=http://a:1/v1"], "--node-url='http://a:1/v1': must be like"),
        (
            ["--host=0.0.0.0", "--", "m"],
            "--host=0.0.0.0: the router hands on admin routes.* add --api-key after --",
        ),
        (["--host=0.0.0.0", "--", "m", "--api-key", ""], "add --api-key after --"),
        (["--host=::1", "--", "m"], "--host=::1: must be a name or an IPv4 address"),
        (["--port=0", "--", "m"], "--port=0: must be a whole number from 1 up to 65535"),
        (["--port=70000", "--", "m"], "--port=70000: must be a whole number from 1 up to 65535"),
        (
            ["--ready-timeout-s=nan", "--", "m"],
            "--ready-timeout-s=nan: must be above 0, up to 86400",
        ),
        (["--ready-timeout-s=-1", "--", "m"], "--ready-timeout-s=-1: must be above 0, up to 86400"),
        (["--router-port=1", "--", "m"], "--router-port: --port says where the router listens"),
        (["--router-policy=auto", "--", "m"], "--router-policy: invalid choice: 'auto'"),
        (["--nodes=1", "--router-policy=power_of_two", "--", "m"], "two nodes or more"),
        (["--router-polic=random", "--", "m"], "unrecognized arguments: --router-polic=random"),
        (["--router-queue-size", "x", "--", "m"], "--router-queue-size: invalid int value: 'x'"),
    ],
)
def test_unusable_command_lines_say_what_is_expected(line: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(line)


def test_nodes_with_a_key_may_be_reached_from_everywhere() -> None:
    options = parse(["--host=0.0.0.0", "--", "m", "--api-key=k"])
    assert options.host == "0.0.0.0"
    assert options.url == "http://127.0.0.1:8000"


def test_a_missing_router_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm_router", None)
    with pytest.raises(ConfigError) as failed:
        parse(["--", "m"])
    assert (
        str(failed.value)
        == MISSING
        == 'vllm-router is not installed: pip install "flying-serving[router]"'
    )


def test_a_port_that_is_taken_is_told_before_nodes_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host=127.0.0.1 --port={port}: address already in use"
        ):
            reserved_port(parse([f"--port={port}", "--", "m"]))


def test_the_routers_port_is_held_while_nodes_start() -> None:
    with ReservedPort() as once:
        port = once.number
    held = reserved_port(parse([f"--port={port}", "--", "m"]))
    with held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


class Admin(BaseHTTPRequestHandler):
    """A node's admin route: 401 without a key, if it has one."""

    has_key = True

    def do_GET(self) -> None:
        """Whatever is asked."""
        self.send_response(401 if self.has_key else 405)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


async def test_nodes_of_this_machine_need_a_key_if_others_reach_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take what the router passes on for what comes from their own machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as node:
        threading.Thread(target=node.serve_forever, daemon=True).start()
        at = f"--node-url=http://127.0.0.1:{node.server_port}"
        elsewhere = "--node-url=http://10.0.0.1:8000"
        await check_nodes(parse(["--host=0.0.0.0", at, elsewhere]))
        monkeypatch.setattr(Admin, "has_key", False)
        await check_nodes(parse([at]))
        with pytest.raises(
            ConfigError, match=f"--host=0.0.0.0 with {at}: start that node with --api-key"
        ):
            await check_nodes(parse(["--host=0.0.0.0", at]))
        node.shutdown()
    with pytest.raises(ConfigError, match=f"{at}: this node does not tell whether it needs a key"):
        await check_nodes(parse(["--host=0.0.0.0", at]))


def test_no_proxy_comes_between_the_router_and_nodes_of_this_machine() -> None:
    assert without_proxy({"http_proxy": "http://p"})["NO_PROXY"] == "127.0.0.1"
    found = without_proxy({"no_proxy": "a,b", "A": "1"})
    assert found == {"no_proxy": "a,b,127.0.0.1", "NO_PROXY": "a,b,127.0.0.1", "A": "1"}
