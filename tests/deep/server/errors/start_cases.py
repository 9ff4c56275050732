"""Wrong use at the start of a server, and what the program answers."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from flying_serving.config import KEY as CONFIG_KEY
from flying_serving.placement.plan import BIND
from tests.deep.server.errors.case import Case
from tests.with_vllm.server.errors.starts import (
    adapters,
    additional,
    engines,
    flags,
    front_end,
    help_of,
    lending,
    lending_of,
    lending_to_kinds,
    model,
    placement,
    speculation,
    starting,
    trace,
    unknown_name,
)

Start = tuple[Callable[..., None], Case]


def _front_end(asked: str, what: str) -> Start:
    says = f"{asked}: {what} cannot be served by Flying Serving yet"
    return front_end, Case(f"`{asked}`", says, 2, {"asked": asked})


def _engines(count: int) -> Start:
    says = f"--data-parallel-size={count}: must be 1, 2, 4 or 8"
    return engines, Case(f"`--data-parallel-size {count}`", says, 2, {"data_parallel_size": count})


NO_HELP = (
    "--help=nonsense: must be all, a part of a flag's name, or one of the groups options, Layout"
)
UNDIVIDED = "model.layers.0.mlp.gate_up_proj: 514 columns do not divide by 4"


def _size(size: int, what: str, problem: str, refused: Mapping[int, str] | None = None) -> Start:
    says, send = f"--group-sizes={size}: {problem}", {"sizes": (1, size), "refused": refused}
    return engines, Case(f"`--group-sizes 1,{size}` {what}", says, 2, send)


def _pooling_size(size: int) -> Start:
    says = f"--group-sizes={size}: pooling models run on each engine alone"
    send = {"sizes": (1, size), "runner_type": "pooling"}
    return engines, Case(f"`--group-sizes 1,{size}` for a pooling model", says, 2, send)


def _flag(name: str, value: str, allowed: str) -> Start:
    return flags, Case(
        f"`--{name} {value}`", f"--{name}={value}: {allowed}", 2, {name.replace("-", "_"): value}
    )


def _lending(call: Callable[..., None], what: str, problem: str, **send: Any) -> Start:
    return call, Case(f"`--lend-weights` {what}", f"--lend-weights: {problem}", 2, send)


def _additional(value: Any, problem: str) -> Start:
    what = f"`--additional-config '{json.dumps({CONFIG_KEY: value})}'`"
    return additional, Case(what, f"--additional-config {CONFIG_KEY}{problem}", 2, {"value": value})


def _model(call: Callable[..., None], path: str, problem: str) -> Start:
    return call, Case(
        f"`flying-serving serve {path}`", f"--model={path}: {problem}", 2, {"path": path}
    )


def _trace(path: str, problem: str) -> Start:
    return trace, Case(f"`--trace-out {path}`", f"--trace-out={path}: {problem}", 2, {"path": path})


def _variable(name: str, value: str, problem: str) -> Start:
    what = f"`{name}={value}` with two engines on CPUs 0-7"
    return placement, Case(what, f"{name}={value!r}: {problem}", 2, {name: value})


def _openmp(name: str, value: str, allowed: str) -> Start:
    reason = f"it would bind all engines to the same cores; {BIND} gives each engine its own"
    return _variable(name, value, f"{allowed}, as {reason}")


FLAG_CASES: tuple[Start, ...] = (
    _engines(3),
    _engines(16),
    (help_of, Case("`--help=nonsense`", NO_HELP, 2, {"word": "nonsense"})),
    _flag("group-sizes", "1,x", "'x' must be a whole number"),
    _flag("group-sizes", "1,3", "group size 3 is not one of 1, 2, 4, 8"),
    _flag("group-sizes", "2,4", "1 must be among the group sizes"),
    _size(8, "with four engines", "there are 4 engines"),
    _pooling_size(2),
    _size(4, "for a model that four do not divide", UNDIVIDED, {4: UNDIVIDED}),
    _flag("weave-steps", "0", "must be a whole number from 1 up to 1000"),
    _flag("weave-steps", "x", "must be a whole number from 1 up to 1000"),
    _flag("max-pause-ms", "-1", "must be a number from 1 up to 3600000"),
    _flag("collective-timeout-s", "0", "must be a number above 0 up to 86400"),
    _flag("lend-blocks", "0", "must be a whole number from 1 up to 1000000"),
    _lending(
        lending,
        "with four engines and `--group-sizes 1,2`",
        "needs a group of all 4 engines (--group-sizes)",
        sizes=(1, 2),
    ),
    _lending(
        lending_of,
        "with latent attention",
        "models with latent attention (MLA) cannot lend weights yet",
        use_mla=True,
    ),
    _lending(
        lending_of,
        "with recurrent state",
        "models with recurrent state cannot lend weights yet",
        has_inner_state=True,
    ),
    _lending(
        lending_of,
        "with speculation",
        "models with speculation (--speculative-config) cannot lend weights yet",
        speculative=speculation(),
    ),
    _lending(
        lending_to_kinds,
        "for a model that mixes kinds of attention",
        "the KV of this model is of several kinds: it gets no lent weights",
    ),
    _lending(
        lending_of,
        "with `--enable-lora`",
        "models with adapters (--enable-lora) cannot lend weights yet",
        lora=adapters(),
    ),
    _flag(
        "policy",
        "always",
        "must be 'auto', 'load', 'priority', 'context', 'gyges', 'static-dp', 'static-tp', "
        "'split' or 'manual'",
    ),
    _flag("max-waiting-requests", "0", "must be a whole number from 1 up to 10000000"),
    _flag("max-body-bytes", "0", "must be a whole number from 1024 up to 1099511627776"),
    _flag("max-waiting-tokens", "0", "must be a whole number from 1 up to 10000000000"),
    _flag("max-queue-wait-s", "0", "must be a number above 0 up to 86400"),
    _flag("priority-aging-s", "0", "must be a number from 1 up to 86400"),
    _flag(
        "most-urgent-priority", "high", "must be a whole number from -9223372036854775808 up to 0"
    ),
    _flag("most-urgent-priority", "5", "must be a whole number from -9223372036854775808 up to 0"),
    _flag(
        "clients-may-set",
        "degree",
        "'degree' must be 'priority', 'tp_degree', 'split_at', 'expected_tokens' or 'none'",
    ),
    _flag("clients-may-set", "none,priority", "none cannot be combined with other fields"),
    _flag("cpu-collectives", "mpi", "must be 'shm', 'gloo' or 'staged'"),
    _additional({"colour": 1}, ".colour=1: unknown; known are group_sizes, policy"),
    _additional({"weave_steps": 0}, ".weave_steps=0: must be a whole number from 1 up to 1000"),
    _additional("x", "='x': must be a JSON object"),
    _model(model, "models/a/b", "neither a directory nor a valid name on Hugging Face"),
    _model(
        unknown_name,
        "models/nope",
        "there is no such directory, and no model of that name is available",
    ),
    _model(model, "docs", "there is no config.json in this directory"),
    _model(
        model,
        "README.md",
        "this is a file; must be a model's directory, or its name on Hugging Face",
    ),
    _trace("docs", "is a directory"),
    _trace("nowhere/trace.json", "no such file or directory"),
    _trace("/dev/null", "must be a regular file"),
    _variable(BIND, "0-3", "1 list; must be 'auto', 'nobind' or 2 lists of CPUs"),
    _variable(BIND, "0-9", "CPU 8 is not one of those that this process may use, 0-7"),
    _variable("OMP_NUM_THREADS", "all", "must be a whole number from 1"),
    _openmp("OMP_PROC_BIND", "true", "must be unset or 'false'"),
    _openmp("OMP_PLACES", "cores", "must be unset"),
    _openmp("GOMP_CPU_AFFINITY", "0-3", "must be unset"),
    _openmp("KMP_AFFINITY", "compact", "must be unset"),
    (
        starting,
        Case(
            "`--port 8000`, which is in use",
            "--host=127.0.0.1 --port=8000: address already in use",
            2,
        ),
    ),
)
FRONT_END_CASES: tuple[Start, ...] = (
    _front_end("--grpc", "vLLM's gRPC server"),
    _front_end("--grpc-port=1", "vLLM's gRPC server"),
    _front_end("--headless", "engines without an API server"),
    _front_end("--api-server-count=2", "a number of API servers other than 1"),
    _front_end("--data-parallel-multi-port-external-lb", "an API server for each engine"),
    _front_end("--data-parallel-external-lb", "an external load balancer"),
    _front_end("--data-parallel-hybrid-lb", "a hybrid load balancer"),
    _front_end("--data-parallel-size-local=1", "engines of another process or machine"),
    _front_end("--data-parallel-rank=0", "an engine whose number another process sets"),
    _front_end("--data-parallel-start-rank=0", "engines of another process or machine"),
    _front_end("--data-parallel-address=10.0.0.7", "engines of another process or machine"),
    _front_end("--data-parallel-backend=ray", "engines that Ray starts"),
    _front_end("--nnodes=2", "more than one node"),
    _front_end("--node-rank=1", "more than one node"),
    _front_end("--distributed-executor-backend=ray", "an executor other than mp and uni"),
    _front_end(
        "--enable-fault-tolerance",
        "vLLM's fault tolerance (lost engines are started again without it)",
    ),
    _front_end("VLLM_USE_RUST_FRONTEND=1", "vLLM's front end in Rust"),
    _front_end("VLLM_DP_SIZE=2", "an engine whose number another process sets"),
    _front_end("VLLM_DP_RANK=1", "an engine whose number another process sets"),
    _front_end(
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
        "request ids that clients choose",
    ),
)
