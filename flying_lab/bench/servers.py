"""Servers to compare: ours with each policy, and stock vLLM, from the same flags."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

from flying_deploy.ports import HOST, ReservedPort
from flying_deploy.serve_args import ServerParser, with_dashes
from flying_lab import emulation
from flying_lab.server_process import ServerProcess, command
from flying_serving.config import FlyingConfig, PolicyName
from flying_serving.errors import ConfigError
from flying_serving.placement.topology import read_topology

READY_S = 1800.0
STOCK = ("stock-dp", "stock-tp")
SYSTEMS: tuple[str, ...] = (*get_args(PolicyName), *STOCK)
_PLUGIN = "flying_serving"
_PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins"
    for kind in ("general", "platform", "io_processor", "stat_logger", "endpoint")
)
"""Entry point groups of vLLM's plugins. VLLM_PLUGINS names the plugins of every group that may be
loaded.
"""
_CHOSEN = {
    "--policy": "--compare names the policies",
    "--host": f"servers listen on {HOST}",
    "--port": "each server gets a free port",
    "--uds": "servers listen on a port",
    "--api-key": "it goes before the --",
}
_OWN = tuple(
    "--" + name.replace("_", "-") for name in FlyingConfig.model_fields if name != "policy"
)


@dataclass(frozen=True)
class ServerArgs:
    """The command line after `--`: the model and flags of every server."""

    model: str
    engines: int
    """Engines of each server: --data-parallel-size."""
    devices: int
    """Devices of each engine: --tensor-parallel-size."""
    shared: tuple[str, ...]
    """Flags of vLLM, for every server."""
    ours: tuple[str, ...]
    """Flags of Flying Serving, which stock vLLM does not have."""


def parse_server_args(line: Sequence[str]) -> ServerArgs:
    """Parse the command line after `--`.

    Raises:
        ConfigError: if the model is not first, or a flag is set by the comparison itself.
    """
    if not line or line[0].startswith("-"):
        raise ConfigError(
            "--compare: after -- the model is expected, then flags of vLLM: -- MODEL [FLAGS]"
        )
    parser = ServerParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    for flag in (*_CHOSEN, *_OWN):
        parser.add_argument(flag)
    found, shared = parser.parse_known_args([with_dashes(word) for word in line[1:]])
    given = {
        "--" + name.replace("_", "-"): value
        for name, value in vars(found).items()
        if value is not None
    }
    for flag, reason in _CHOSEN.items():
        if flag in given:
            raise ConfigError(f"{flag}={given[flag]!r} after --: {reason}")
    if not any(
        "enable-per-request-metrics" in word or word == "--disable-log-stats" for word in shared
    ):
        # without it no server reports how long requests wait
        shared.append("--enable-per-request-metrics")
    ours = tuple(f"{flag}={given[flag]}" for flag in _OWN if flag in given)
    return ServerArgs(
        line[0], found.data_parallel_size, found.tensor_parallel_size, tuple(shared), ours
    )


def command_line(name: str, args: ServerArgs, port: int) -> list[str]:
    """Return the command line of a server: one of SYSTEMS on a port."""
    sizes = [f"--data-parallel-size={args.engines}", f"--tensor-parallel-size={args.devices}"]
    if name == "stock-tp":
        sizes = [f"--tensor-parallel-size={args.engines * args.devices}"]
    if name in STOCK:
        module, line = "vllm.entrypoints.openai.api_server", [f"--model={args.model}", *sizes]
    else:
        module = "flying_serving.cli.main"
        line = ["serve", args.model, f"--policy={name}", *sizes, *args.ours]
    if any(flag.startswith(f"--worker-cls={emulation.MODULE}.") for flag in args.shared):
        module = emulation.MODULE
    listen = [f"--host={HOST}", f"--port={port}"]
    return [sys.executable, "-m", module, *line, *listen, *args.shared]


def environment(
    name: str, args: ServerArgs, api_key: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a server: stock vLLM without our plugin, all with the same number
    of threads.
    """
    threads = max(1, read_topology().usable_cores // (args.engines * args.devices))
    made = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), **base}
    made.pop("VLLM_API_KEY", None)
    if api_key:
        made["VLLM_API_KEY"] = api_key
    if name in STOCK:
        installed = [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)]
        plugins = made["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in made else installed
        made["VLLM_PLUGINS"] = ",".join(plugin for plugin in plugins if plugin != _PLUGIN)
    return made


def start(name: str, args: ServerArgs, api_key: str, log: Path) -> ServerProcess:
    """Start one of SYSTEMS on a port that is held for it."""
    port = ReservedPort()
    surroundings = environment(name, args, api_key, os.environ)
    scratch = Path(tempfile.mkdtemp(prefix="flying-bench-"))
    return ServerProcess(
        command(command_line(name, args, port.number)), surroundings, port, log, scratch
    )
