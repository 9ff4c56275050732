"""Flags and variables of vLLM that lead around the API server of this process, and so around Flying
Serving.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from flying_serving.errors import UNSERVED, Unsupported

_ELSEWHERE = "engines of another process or machine"
_RANKS = "an engine whose number another process sets"
_OFF = (None, "", "0")
"""Values of a variable that do not set it."""

FRONT_ENDS: Mapping[str, tuple[tuple[str, tuple[object, ...], str], ...]] = {
    "front ends": (
        ("--grpc", (False,), "vLLM's gRPC server"),
        ("--grpc-port", (None,), "vLLM's gRPC server"),
        ("VLLM_USE_RUST_FRONTEND", _OFF, "vLLM's front end in Rust"),
        ("--headless", (False,), "engines without an API server"),
        ("--api-server-count", (None, 1), "a number of API servers other than 1"),
        ("--data-parallel-multi-port-external-lb", (False,), "an API server for each engine"),
    ),
    "nodes": (
        ("--data-parallel-external-lb", (False,), "an external load balancer"),
        ("--data-parallel-hybrid-lb", (False,), "a hybrid load balancer"),
        ("--data-parallel-size-local", (None,), _ELSEWHERE),
        ("--data-parallel-rank", (None,), _RANKS),
        ("--data-parallel-start-rank", (None,), _ELSEWHERE),
        ("--data-parallel-address", (None,), _ELSEWHERE),
        ("--nnodes", (1,), "more than one node"),
        ("--node-rank", (0,), "more than one node"),
        ("VLLM_DP_SIZE", (*_OFF, "1"), _RANKS),
        ("VLLM_DP_RANK", _OFF, _RANKS),
    ),
    "engines": (
        ("--data-parallel-backend", ("mp",), "engines that Ray starts"),
        (
            "--distributed-executor-backend",
            (None, "mp", "uni"),
            "an executor other than mp and uni",
        ),
        (
            "--enable-fault-tolerance",
            (False,),
            "vLLM's fault tolerance (lost engines are started again without it)",
        ),
    ),
    "requests": (
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", _OFF, "request ids that clients choose"),
    ),
}
"""Flags and variables, with the values that are served and what others ask for, by rows of the
documentation.
"""


def refuse_other_front_ends(args: Any, environment: Mapping[str, str]) -> None:
    """Raise Unsupported for the first flag or variable that asks for another front end, or for
    engines elsewhere.

    Args:
        args: the flags of vLLM's `serve`.
        environment: the variables of this process.
    """
    asked = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    if args.data_parallel_size_local == args.data_parallel_size:
        asked["--data-parallel-size-local"] = None
    asked |= environment
    for name, served, what in chain.from_iterable(FRONT_ENDS.values()):
        value = asked.get(name)
        if value not in served:
            shown = name if value is True else f"{name}={value}"
            raise Unsupported(f"{shown}: {what} {UNSERVED}")
