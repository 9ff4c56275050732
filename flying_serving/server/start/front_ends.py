"""Flags and variables of vLLM that lead around the API server of this process, and so around Flying
Serving.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flying_serving.errors import Unsupported

_OFF = ("", "0")
"""Values of a variable that do not set it."""
_ELSEWHERE = "engines of another process or machine"
_RANKS = "an engine whose number another process sets"


def refuse_other_front_ends(args: Any, environment: Mapping[str, str]) -> None:
    """Raise Unsupported for the first flag or variable that asks for another front end, or for
    engines elsewhere.

    Args:
        args: the flags of vLLM's `serve`.
        environment: the variables of this process.
    """
    for asked, what in (*_front_ends(args), *_engines(args), *_variables(environment)):
        raise Unsupported(f"{asked}: {what} cannot be served by Flying Serving yet")


def _front_ends(args: Any) -> Iterator[tuple[str, str]]:
    """Yield the flags for a front end in place of vLLM's HTTP server, or beside it."""
    if args.grpc:
        yield "--grpc", "vLLM's gRPC server"
    if args.grpc_port is not None:
        yield f"--grpc-port={args.grpc_port}", "vLLM's gRPC server"
    if args.headless:
        yield "--headless", "engines without an API server"
    if args.api_server_count not in (None, 1):
        yield f"--api-server-count={args.api_server_count}", "a number of API servers other than 1"
    if args.data_parallel_multi_port_external_lb:
        yield "--data-parallel-multi-port-external-lb", "an API server for each engine"
    if args.data_parallel_external_lb:
        yield "--data-parallel-external-lb", "an external load balancer"
    if args.data_parallel_hybrid_lb:
        yield "--data-parallel-hybrid-lb", "a hybrid load balancer"


def _engines(args: Any) -> Iterator[tuple[str, str]]:
    """Yield the flags for engines on another machine, or that another process starts."""
    if args.data_parallel_size_local not in (None, args.data_parallel_size):
        yield f"--data-parallel-size-local={args.data_parallel_size_local}", _ELSEWHERE
    if args.data_parallel_rank is not None:
        yield f"--data-parallel-rank={args.data_parallel_rank}", _RANKS
    if args.data_parallel_start_rank is not None:
        yield f"--data-parallel-start-rank={args.data_parallel_start_rank}", _ELSEWHERE
    if args.data_parallel_address is not None:
        yield f"--data-parallel-address={args.data_parallel_address}", _ELSEWHERE
    if args.data_parallel_backend != "mp":
        yield f"--data-parallel-backend={args.data_parallel_backend}", "engines that Ray starts"
    if args.nnodes > 1:
        yield f"--nnodes={args.nnodes}", "more than one node"
    if args.node_rank > 0:
        yield f"--node-rank={args.node_rank}", "more than one node"
    if args.distributed_executor_backend not in (None, "mp", "uni"):
        yield (
            f"--distributed-executor-backend={args.distributed_executor_backend}",
            "an executor other than mp and uni",
        )
    if args.enable_fault_tolerance:
        yield (
            "--enable-fault-tolerance",
            "vLLM's fault tolerance (lost engines are started again without it)",
        )


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables of the environment that ask for the same."""
    for name, what in (
        ("VLLM_USE_RUST_FRONTEND", "vLLM's front end in Rust"),
        ("VLLM_DP_SIZE", _RANKS),
        ("VLLM_DP_RANK", _RANKS),
        (
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
            "request ids that clients choose",
        ),
    ):
        value = environment.get(name, "")
        if value not in _OFF and (name, value) != ("VLLM_DP_SIZE", "1"):
            yield f"{name}={value}", what
