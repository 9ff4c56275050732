"""The command line of a node, and its environment: the parts that nodes on one machine share, and
the parts that they may not.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Self

from flying_serving.errors import ConfigError
from flying_serving.placement.plan import BIND, NOBIND, THREADS, plan
from flying_serving.placement.topology import format_cpus, read_topology

DEVICES = "CUDA_VISIBLE_DEVICES"
_CHOSEN = {
    "--host": "nodes of this machine listen on 127.0.0.1",
    "--port": "each node gets a free port",
    "--uds": "nodes listen on a port",
    "--ssl-keyfile": "routers speak plain HTTP to nodes",
    "--ssl-certfile": "routers speak plain HTTP to nodes",
}


class ServerParser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"after --: {message}")


@dataclass(frozen=True)
class ServeArgs:
    """The words after `flying-serving serve`, the model first, without a port."""

    words: tuple[str, ...]
    engines: int
    """Engines of each node: --data-parallel-size."""
    devices: int
    """Devices of each engine: --tensor-parallel-size."""
    shutdown_s: float
    """--shutdown-timeout: how long requests may go on when the node is told to end."""
    has_key: bool
    """True if --api-key, or VLLM_API_KEY, makes nodes ask for a key; an empty one does not."""

    def with_flag(self, flag: str) -> Self:
        """Return the arguments with one flag more, before the user's flags, which count if they set
        the same flag.
        """
        return replace(self, words=(self.words[0], flag, *self.words[1:]))


def parse_serve_args(line: Sequence[str]) -> ServeArgs:
    """Parse the command line of nodes.

    Raises:
        ConfigError: if the model is not first, or a flag is set for each node by itself.
    """
    if not line or line[0].startswith("-"):
        raise ConfigError(
            "after -- the model is expected, then flags of `flying-serving serve`: -- MODEL [FLAGS]"
        )
    parser = ServerParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--api-key", nargs="+", default=[os.environ.get("VLLM_API_KEY", "")])
    for flag in _CHOSEN:
        parser.add_argument(flag)
    found, _ = parser.parse_known_args([with_dashes(word) for word in line[1:]])
    for flag, reason in _CHOSEN.items():
        if (value := getattr(found, flag[2:].replace("-", "_"))) is not None:
            raise ConfigError(f"{flag}={value!r} after --: {reason}")
    sizes = (found.data_parallel_size, found.tensor_parallel_size)
    return ServeArgs(tuple(line), *sizes, found.shutdown_timeout, any(found.api_key))


def with_dashes(word: str) -> str:
    """Return a flag with dashes for underscores in its name, which vLLM's parser takes too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def environment_of(
    node: int, nodes: int, args: ServeArgs, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one of `nodes` nodes: its share of the processors, and devices of
    its own.

    Raises:
        ConfigError: if CUDA_VISIBLE_DEVICES names fewer devices than all nodes need, or the
            processors cannot be shared as environment variables say.
    """
    each = args.engines * args.devices
    all_nodes = plan(read_topology(), base, nodes * args.engines, args.devices)
    own = all_nodes[node * each : (node + 1) * each]
    lists = [format_cpus(placement.cpus) for placement in own]
    made = {**base, BIND: "|".join(lists) if all(lists) else NOBIND}
    threads = [placement.threads for placement in own]
    # otherwise the lists of its CPUs say them
    if len(set(threads)) == 1 or threads != [len(placement.cpus) for placement in own]:
        made[THREADS] = str(min(threads))
    visible = base.get(DEVICES, ",".join(map(str, range(nodes * each))))
    if visible:  # an empty value hides all
        names = visible.split(",")
        if len(names) < nodes * each:
            raise ConfigError(
                f"{DEVICES}={visible}: {nodes} nodes with {each} devices each need {nodes * each}"
            )
        made[DEVICES] = ",".join(names[node * each : (node + 1) * each])
    return made
