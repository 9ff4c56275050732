"""The command line of nodes behind vllm-router: our flags, vllm-router's, and the flags of
nodes.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NoReturn
from urllib.parse import urlsplit

from flying_deploy.nodes import READY
from flying_deploy.ports import HOST
from flying_deploy.serve_args import ServeArgs, parse_serve_args
from flying_serving.errors import ConfigError

PROGRAM = "python -m flying_deploy.vllm_router"
NODES, MAX_NODES = 2, 64
EVERYWHERE = "0.0.0.0"
MISSING = 'vllm-router is not installed: pip install "flying-serving[router]"'
PREFIX = "--router-"
MAX_PORT = 65535
READY_S, MAX_READY_S = 1800.0, 86_400.0
USAGE = f"{PROGRAM} [OPTIONS] [--router-FLAG ...] [-- MODEL [FLAGS]]"
DESCRIPTION = (
    "Start nodes on this machine, each a `flying-serving serve MODEL FLAGS`, and "
    "vllm-router before them."
)
SETTINGS = {
    "--policy": "cache_aware",
    "--health-check-endpoint": READY,
    "--health-check-interval-secs": "1",
    "--health-failure-threshold": "1",
    "--health-success-threshold": "1",
    "--worker-startup-check-interval": "1",
    "--cb-failure-threshold": "3",
    "--cb-success-threshold": "1",
    "--cb-timeout-duration-secs": "1",
    "--log-level": "error",
}
"""Flags of the router, unless the user sets others.

Every `--worker-startup-check-interval`, which is a second here, the router asks whether a node
takes requests. For `power_of_two` it also asks how many the node has. It leaves a node that refuses
connections at once. The circuit breaker opens at the third failure in a row, which the retries of
one request reach. It lets requests through again a second later. With `info`, for which it also
takes `warning`, it logs the sessions that it routes by.
"""
BY_TOKENS = ("cache_aware", "kv_aware")
"""Policies by the tokens of a prompt."""
SCALE_OUT = "--enable-scale-out"
"""A flag of nodes: with it they tell the router the tokens of a text (`/v1/completions/render`),
without it no process does.
"""
_SET_KEY = (
    "the router hands on admin routes, which answer this machine without a key: add "
    "--api-key after --"
)
_CHOSEN = {
    "host": "--host says where the router listens",
    "port": "--port says where the router listens",
    "worker-urls": "--node-url names nodes that run already",
}


class _RouterParser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ").replace("--", PREFIX, 1))


@dataclass(frozen=True)
class Options:
    """The values of a command line. `router`: flags of vllm-router. `serve`: the arguments of each
    of `nodes` nodes on this machine.
    """

    nodes: int
    node_urls: tuple[str, ...]
    host: str
    port: int
    ready_s: float
    router: tuple[str, ...]
    serve: ServeArgs | None

    @property
    def url(self) -> str:
        """The URL of the router, as this machine reaches it."""
        return f"http://{HOST if self.host == EVERYWHERE else self.host}:{self.port}"


def parse(line: Sequence[str]) -> Options:
    """Parse a command line.

    Raises:
        ConfigError: naming the flag, its value and the allowed values; or if vllm-router is not
            installed.
    """
    words = list(line)
    ours, theirs = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    given, others = _parser().parse_known_args(ours)
    asked = _asked_of_router(others)
    serve = parse_serve_args(theirs) if theirs else None
    nodes = given.nodes if given.nodes is not None else NODES if serve else 0
    if ":" in given.host:
        raise ConfigError(f"--host={given.host}: must be a name or an IPv4 address")
    if not 1 <= given.port <= MAX_PORT:
        raise ConfigError(f"--port={given.port}: must be a whole number from 1 up to {MAX_PORT}")
    if not 0 < given.ready_timeout_s <= MAX_READY_S:
        raise ConfigError(
            f"--ready-timeout-s={given.ready_timeout_s:g}: must be above 0, up to {MAX_READY_S:g}"
        )
    if not 0 <= nodes <= MAX_NODES:
        raise ConfigError(f"--nodes={nodes}: must be a whole number from 0 up to {MAX_NODES}")
    if nodes and serve is None:
        raise ConfigError(f"--nodes={nodes}: -- MODEL [FLAGS] is expected")
    if serve is not None and not nodes:
        raise ConfigError("--nodes=0: there is no node on this machine for what follows --")
    if not nodes and not given.node_url:
        raise ConfigError("there are no nodes: -- MODEL [FLAGS] or --node-url is expected")
    if serve is not None and not serve.has_key and not is_loopback(given.host):
        raise ConfigError(f"--host={given.host}: {_SET_KEY}")
    for url in given.node_url:
        _check_url(url)
    router, policy = router_flags(asked)
    if policy == "power_of_two" and nodes + len(given.node_url) < 2:
        raise ConfigError("--router-policy=power_of_two: chooses between two nodes or more")
    if serve is not None and policy in BY_TOKENS:
        serve = serve.with_flag(SCALE_OUT)
    return Options(
        nodes, tuple(given.node_url), given.host, given.port, given.ready_timeout_s, router, serve
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument(
        "--nodes",
        type=int,
        help=f"nodes to start on this machine (default: {NODES}, without MODEL 0)",
    )
    parser.add_argument(
        "--node-url", action="append", default=[], help="a node that runs already; may be repeated"
    )
    parser.add_argument(
        "--host", default=HOST, help="where the router listens (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="where the router listens (default: %(default)s)"
    )
    parser.add_argument(
        "--ready-timeout-s",
        type=float,
        default=READY_S,
        help="longest time of a start (default: %(default)s)",
    )
    return parser


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
        raise ConfigError(f"--node-url={url!r}: must be like http://10.0.0.1:8000")


def is_loopback(host: str) -> bool:
    """Return whether a host, by name or address, is this machine and no other reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _asked_of_router(words: Sequence[str]) -> list[str]:
    """Return flags of vllm-router by its own names. Raises ConfigError for a flag that it lacks, or
    that is ours to set.
    """
    for word in (*words[:1], *(word for word in words if word.startswith("-"))):
        if not word.startswith(PREFIX):
            raise ConfigError(
                f"{word}: unknown; flags of vllm-router begin with {PREFIX}, those of nodes "
                "follow --"
            )
        name = word.removeprefix(PREFIX).partition("=")[0]
        if name in _CHOSEN:
            raise ConfigError(f"{PREFIX}{name}: {_CHOSEN[name]}")
    return [f"--{word.removeprefix(PREFIX)}" if word.startswith(PREFIX) else word for word in words]


def router_flags(asked: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return our settings of vllm-router, then the user's, which take their place; and its policy.

    Raises:
        ConfigError: if it is not installed, has no such flag, or does not take the value.
    """
    if importlib.util.find_spec("vllm_router") is None:
        raise ConfigError(MISSING)
    from vllm_router.router_args import RouterArgs

    parser = _RouterParser(allow_abbrev=False, add_help=False)
    RouterArgs.add_cli_args(parser)
    flags = (*(word for setting in SETTINGS.items() for word in setting), *asked)
    return flags, parser.parse_args(flags).policy
