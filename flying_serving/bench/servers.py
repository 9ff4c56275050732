"""Servers to compare: ours with each policy, and stock vLLM, made of the same words of a command line."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import NoReturn, get_args

from flying_serving.bench.health import Health
from flying_serving.config import FlyingConfig, PolicyName
from flying_serving.errors import BenchError, ConfigError

HOST = "127.0.0.1"
READY_S = 1800.0
STOP_S = 30.0
STOP_STARTING_S = 2.0
"""vLLM does not obey SIGTERM while its engines start, so there is no use in waiting longer then."""
LOG_LINES = 15
STOCK = ("stock-dp", "stock-tp")
SYSTEMS: tuple[str, ...] = (*get_args(PolicyName), *STOCK)
_PLUGIN = "flying_serving"
_PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger", "endpoint")
)
"""Of VLLM_PLUGINS, which names those of every kind that may be loaded."""
_CHOSEN = {
    "--policy": "--compare names the policies",
    "--host": f"servers listen on {HOST}",
    "--port": "each server gets a free port",
    "--uds": "servers listen on a port",
    "--api-key": "it goes before the --",
}
_OWN = tuple("--" + name.replace("_", "-") for name in FlyingConfig.model_fields if name != "policy")


@dataclass(frozen=True)
class Words:
    """What stands after `--`: the model and flags for every server."""

    model: str
    engines: int
    """--data-parallel-size"""
    devices: int
    """--tensor-parallel-size: of each engine"""
    shared: tuple[str, ...]
    """Flags of vLLM."""
    ours: tuple[str, ...]
    """Flags of Flying Serving, which stock vLLM does not have."""


class _Parser(argparse.ArgumentParser):
    """Does not end the process over a wrong word."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"after --: {message}")


def parse_words(words: Sequence[str]) -> Words:
    """Take apart what stands after `--`.

    Raises:
        ConfigError: if the model is not the first word, or a flag is set by the comparison itself.
    """
    if not words or words[0].startswith("-"):
        raise ConfigError("--compare: after -- the model is expected, then flags of vLLM: -- MODEL [FLAGS]")
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    for flag in (*_CHOSEN, *_OWN):
        parser.add_argument(flag)
    found, shared = parser.parse_known_args([_dashes(word) for word in words[1:]])
    given = {"--" + name.replace("_", "-"): value for name, value in vars(found).items() if value is not None}
    for flag, reason in _CHOSEN.items():
        if flag in given:
            raise ConfigError(f"{flag}={given[flag]!r} after --: {reason}")
    if not any("enable-per-request-metrics" in word or word == "--disable-log-stats" for word in shared):
        shared.append("--enable-per-request-metrics")  # else no server says how long requests wait
    ours = tuple(f"{flag}={given[flag]}" for flag in _OWN if flag in given)
    return Words(words[0], found.data_parallel_size, found.tensor_parallel_size, tuple(shared), ours)


def _dashes(word: str) -> str:
    """A flag as vLLM's parser takes it too: with dashes for underscores in its name."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def command(name: str, words: Words, port: int) -> list[str]:
    """The command line of a server: one of SYSTEMS on a port."""
    sizes = [f"--data-parallel-size={words.engines}", f"--tensor-parallel-size={words.devices}"]
    if name == "stock-tp":
        sizes = [f"--tensor-parallel-size={words.engines * words.devices}"]
    if name in STOCK:
        line = ["vllm.entrypoints.openai.api_server", f"--model={words.model}", *sizes]
    else:
        line = ["flying_serving.cli.main", "serve", words.model, f"--policy={name}", *sizes, *words.ours]
    listen = [f"--host={HOST}", f"--port={port}"]
    return [sys.executable, "-m", *line, *listen, *words.shared]


def environment(name: str, words: Words, api_key: str, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server: stock vLLM without our plugin, all with the same number of threads."""
    threads = max(1, (os.cpu_count() or 1) // words.engines)
    made = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads), **base}
    made.pop("VLLM_API_KEY", None)
    if api_key:
        made["VLLM_API_KEY"] = api_key
    if name in STOCK:
        installed = [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)]
        wanted = made["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in made else installed
        made["VLLM_PLUGINS"] = ",".join(plugin for plugin in wanted if plugin != _PLUGIN)
    return made


class ServerProcess:
    """A server in a process group of its own, so that Ctrl-C does not reach it unasked. Use it as a context manager.

    It is in its client's session all the same: Linux divides the processor between sessions (autogroup), and a client
    beside servers in another session was seen to wait for seconds.

    Args:
        line: its command line.
        environment: its environment.
        url: where it will listen.
        log: file for what it prints.
    """

    def __init__(self, line: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> None:
        self.line = list(line)
        self.url = url
        self._log = log
        self._ready = False
        self.scratch = tempfile.mkdtemp(prefix="flying-bench-")
        surroundings = {**environment, "TMPDIR": self.scratch}  # vLLM leaves its sockets behind
        with log.open("w") as out:
            self.process = subprocess.Popen(
                line, env=surroundings, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )

    def wait_until_ready(self) -> float:
        """Wait until the server answers. Returns the seconds since the call.

        Raises:
            BenchError: if it ends, or takes longer than READY_S; with the end of its log.
        """
        started = time.monotonic()
        with Health(self.url) as health:
            while not health.answers():
                if self.process.poll() is not None:
                    raise BenchError(f"the server ended with code {self.process.returncode}; {self._end_of_log()}")
                if time.monotonic() - started > READY_S:
                    raise BenchError(f"the server was not ready within {READY_S:.0f} s; {self._end_of_log()}")
                time.sleep(0.2)
        self._ready = True
        return time.monotonic() - started

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self._log} ends with:", *lines])

    def stop(self) -> None:
        """End the server and all that it has started."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S if self._ready else STOP_STARTING_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(name: str, words: Words, api_key: str, log: Path) -> ServerProcess:
    """Start one of SYSTEMS on a free port."""
    port = free_port()
    surroundings = environment(name, words, api_key, os.environ)
    return ServerProcess(command(name, words, port), surroundings, f"http://{HOST}:{port}", log)


def free_port() -> int:
    """A port that the operating system says is free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
