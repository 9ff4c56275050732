"""Servers to compare: what each is started with."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flying_lab.bench import servers
from flying_lab.bench.servers import ServerArgs, command_line, environment, parse_server_args
from flying_serving.config import FlyingConfig
from flying_serving.errors import ConfigError
from tests.unit.placement.machines import machine

SIZES = ["-dp", "4", "--tensor_parallel_size=2"]
OURS = ["--horizon-s=5", "--lend_blocks", "8"]
ARGS = parse_server_args(
    ["model", "--dtype", "float32", *SIZES, *OURS, "--enforce-eager", "--max-model-len", "2048"]
)


def options(line: list[str]) -> dict[str, str]:
    """Return the flags of a command line with their values."""
    return dict(word.partition("=")[::2] for word in line if word.startswith("--"))


def test_the_command_line_is_parsed_however_it_is_written() -> None:
    assert ARGS.model == "model"
    assert ARGS.engines == 4
    assert ARGS.devices == 2
    shared = (
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "2048",
        "--enable-per-request-metrics",
    )
    assert ARGS.shared == shared
    assert ARGS.ours == ("--horizon-s=5", "--lend-blocks=8")


@pytest.mark.parametrize("flag", ["--disable-log-stats", "--no-enable-per-request-metrics"])
def test_metrics_of_requests_are_asked_for_where_they_can_be(flag: str) -> None:
    """vLLM does not start with them and --disable-log-stats."""
    assert parse_server_args(["model", flag]).shared == (flag,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "-- MODEL"),
        (["--dtype=float32"], "-- MODEL"),
        (["m", "--port=80"], "--port='80' after --: each server gets a free port"),
        (["m", "--policy", "auto"], "--policy='auto' after --: --compare names"),
        (["m", "--api-key=secret"], "before the --"),
        (["m", "-dp", "two"], "after --: .*invalid int value: 'two'"),
        (["m", "--horizon-s"], "after --: .*expected one argument"),
    ],
)
def test_unusable_command_lines_say_what_is_expected(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_server_args(given)


def test_every_system_gets_the_same_flags_in_its_own_sizes() -> None:
    """Stock TP joins all engines; our flags go to our servers alone."""
    lines = {name: command_line(name, ARGS, 5000) for name in servers.SYSTEMS}
    for name, line in lines.items():
        found = options(line)
        assert line[:2] == [sys.executable, "-m"] and found["--port"] == "5000"
        assert line[-len(ARGS.shared) :] == list(ARGS.shared)
        stock = name in servers.STOCK
        assert line[2] == (
            "vllm.entrypoints.openai.api_server" if stock else "flying_serving.cli.main"
        )
        assert found.get("--policy") == (None if stock else name)
        assert ("--horizon-s" in found) is not stock
        sizes = (found.get("--data-parallel-size"), found["--tensor-parallel-size"])
        assert sizes == ((None, "8") if name == "stock-tp" else ("4", "2"))


def test_servers_on_emulated_devices_are_those_of_the_emulation() -> None:
    shared = ("--worker-cls=flying_lab.emulation.worker.EmulatedWorker",)
    args = ServerArgs("m", 2, 1, shared, ())
    for name in servers.SYSTEMS:
        line = command_line(name, args, 5000)
        assert line[2] == "flying_lab.emulation"
        assert (line[3] == "serve") is (name not in servers.STOCK)


def test_all_our_flags_are_known_and_none_reaches_stock_vllm() -> None:
    flags = [
        "--" + field.replace("_", "-") for field in FlyingConfig.model_fields if field != "policy"
    ]
    args = parse_server_args(["model", *(f"{flag}=1" for flag in flags)])
    assert sorted(args.ours) == sorted(f"{flag}=1" for flag in flags)
    assert args.shared == ("--enable-per-request-metrics",)


def test_stock_vllm_does_not_load_our_plugin() -> None:
    """Whatever else is installed or asked for; the key goes by the environment, and only the one of
    this comparison.
    """
    args = ServerArgs("m", 2, 1, (), ())
    assert "flying_serving" not in environment("stock-dp", args, "", {})["VLLM_PLUGINS"].split(",")
    asked = {"VLLM_PLUGINS": "other,flying_serving", "VLLM_API_KEY": "old", "OMP_NUM_THREADS": "7"}
    stock, ours = (
        environment(name, args, key, asked) for name, key in (("stock-dp", "new"), ("auto", ""))
    )
    assert stock["VLLM_PLUGINS"] == "other"
    assert stock["VLLM_API_KEY"] == "new"
    assert stock["OMP_NUM_THREADS"] == "7"
    assert ours["VLLM_PLUGINS"] == asked["VLLM_PLUGINS"] and "VLLM_API_KEY" not in ours


def test_devices_share_the_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "read_topology", lambda: machine(16, quota_cpus=9.0))
    assert environment("auto", ServerArgs("m", 2, 2, (), ()), "", {})["OMP_NUM_THREADS"] == "2"


def test_help_names_the_systems() -> None:
    """The help text is written out, so that `--help` imports nothing large."""
    line = [sys.executable, "-m", "flying_serving.cli.main", "bench", "--help"]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in (*servers.STOCK, "static-dp", "static-tp", "auto"))


LISTENS = """
import http.server, pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
"""In place of a server: it listens once there is a file, as servers listen once they have imported
vLLM.
"""


def test_no_other_process_gets_the_port_of_a_server_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    monkeypatch.setattr(
        servers,
        "command_line",
        lambda name, args, port: [sys.executable, "-c", LISTENS, str(go), str(port)],
    )
    with servers.start("auto", ARGS, "", tmp_path / "log") as server:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))
        go.touch()
        server.wait_until_ready(60)
