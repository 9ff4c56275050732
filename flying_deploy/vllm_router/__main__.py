"""Nodes on this machine behind vllm-router, which avoids nodes that die or drain. These are started
again.

    python -m flying_deploy.vllm_router --nodes 2 --port 8000 -- MODEL [FLAGS]
    python -m flying_deploy.vllm_router --node-url http://10.0.0.1:8000 [--node-url ...]

FLAGS are flags of `flying-serving serve`. Flags of vllm-router are given as `--router-FLAG`, like
`--router-policy power_of_two`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx

from flying_deploy.nodes import ANSWER_S, Node, Supervised, serve
from flying_deploy.ports import HOST, ReservedPort
from flying_deploy.serve_args import environment_of
from flying_deploy.vllm_router.options import Options, is_loopback, parse
from flying_serving.errors import ConfigError, FlyingError

END_S = 30.0
"""The time for nodes to end, beyond their --shutdown-timeout."""
ADMIN = "/flying/layout"
"""An admin route of nodes, which without a key answers this machine."""
READY = "/readiness"
"""The route of vllm-router that tells whether it has a node."""


def main() -> int:
    """Serve until a signal. Returns the exit code: 0, 1 if something does not start, 2 if the
    command line is wrong.
    """
    try:
        options = parse(sys.argv[1:])
        asyncio.run(run(options))
    except asyncio.CancelledError:
        return 0
    except FlyingError as error:
        sys.stderr.write(f"flying-serving: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def run(options: Options) -> None:
    """Start everything, and keep it running until SIGTERM or SIGINT, which raises
    asyncio.CancelledError.

    Raises:
        ConfigError: if the router cannot listen at its address.
        ServerFailed: if something does not start.
    """
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with reserved_port(options):
        await check_nodes(options)
        nodes = local_nodes(options)
        end_s = END_S + (0.0 if options.serve is None else options.serve.shutdown_s)
        await serve(
            nodes, Router([*(node.url for node in nodes), *options.node_urls], options), end_s
        )


def reserved_port(options: Options) -> ReservedPort:
    """Hold the router's port: nodes take minutes to start, and the router is started after them.

    Raises:
        ConfigError: if the router cannot listen there.
    """
    try:
        return ReservedPort(options.port, options.host)
    except OSError as error:
        raise ConfigError(
            f"--host={options.host} --port={options.port}: {error.strerror}".lower()
        ) from None


async def check_nodes(options: Options) -> None:
    """Raise ConfigError if the router opens admin routes of nodes on this machine to other
    machines.
    """
    if is_loopback(options.host):
        return
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
        for url in options.node_urls:
            if not is_loopback(urlsplit(url).hostname or ""):
                continue  # it sees a peer that is not on its machine, and refuses it without a key
            try:
                status = (await http.get(f"{url}{ADMIN}")).status_code
            except httpx.HTTPError as error:
                raise ConfigError(
                    f"--node-url={url}: this node does not tell whether it needs a key ({error!r})"
                ) from None
            if status != HTTPStatus.UNAUTHORIZED:
                raise ConfigError(
                    f"--host={options.host} with --node-url={url}: start that node with --api-key"
                )


def local_nodes(options: Options) -> list[Node]:
    """Return the nodes of this machine, not yet started."""
    if options.serve is None:
        return []
    given = options.serve
    environments = [
        environment_of(number, options.nodes, given, os.environ) for number in range(options.nodes)
    ]
    return [
        Node(number, given.words, each, options.ready_s) for number, each in enumerate(environments)
    ]


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that reaches nodes of this machine, without a proxy for
    them.
    """
    excepted = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    direct = ",".join(filter(None, [excepted, HOST]))
    return {**environment, "no_proxy": direct, "NO_PROXY": direct}


class Router(Supervised):
    """The process of vllm-router, in front of nodes."""

    def __init__(self, urls: Sequence[str], options: Options) -> None:
        self._metrics_port = ReservedPort()
        line = [
            "vllm_router.launch_router",
            f"--host={options.host}",
            f"--port={options.port}",
            "--worker-urls",
            *urls,
        ]
        line += [f"--prometheus-port={self._metrics_port.number}"]
        line += [f"--worker-startup-timeout-secs={options.ready_s:.0f}", *options.router]
        super().__init__(
            "router", line, without_proxy(os.environ), options.url, READY, options.ready_s
        )


if __name__ == "__main__":
    sys.exit(main())
