"""Starts of a server with a wrong flag, variable or model, by the function that refuses it."""

import errno
import functools
from collections.abc import Callable, Mapping
from contextlib import chdir
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import CompilationMode, CUDAGraphMode, SpeculativeConfig
from vllm.config.lora import LoRAConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.cli.serve import _flying_settings, explain_mistakes, make_parser
from flying_serving.config import KEY as CONFIG_KEY
from flying_serving.config import Deployment, FlyingConfig
from flying_serving.observe.tracing.file import begin_trace
from flying_serving.placement.plan import plan
from flying_serving.server.start.capabilities import refuse_unsupported
from flying_serving.server.start.execution import settle_execution
from flying_serving.server.start.front_ends import refuse_other_front_ends
from flying_serving.server.start.support import (
    choose_group_sizes,
    no_model,
    refuse_missing_model,
)
from flying_serving.weights.lending.lent_memory import LentMemory
from harness.live import ROOT
from tests.unit.placement.machines import machine
from tests.with_vllm.vllm_adapter.kv_lanes import config


class Changed:
    """An object of vLLM, of which some attributes have other values. All of them are its own, so
    that a start which looks at one that vLLM has not any more fails.
    """

    def __init__(self, real: Any, **values: Any) -> None:
        unknown = [name for name in values if not hasattr(real, name)]
        assert not unknown, f"{type(real).__name__} has no {unknown}"
        self._real = real
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


SERVED: dict[str, dict[str, Any]] = {
    "parallel_config": {"data_parallel_size": 4},
    "model_config": {
        "architecture": "XForCausalLM",
        "get_head_size": lambda: 576,
        "enforce_eager": True,
        "max_model_len": 4096,
        "get_total_num_kv_heads": lambda: 4,
    },
    "scheduler_config": {"max_num_batched_tokens": 2048},
}
"""Four engines and a model of 8 heads, 4 KV heads, by part of a VllmConfig."""
NAMES = {
    "v2": "use_v2_model_runner",
    "offloaded": "kv_offloading_size",
    "step_tokens": "max_num_batched_tokens",
    "threshold": "long_prefill_token_threshold",
    "chunked": "enable_chunked_prefill",
    "draft_metrics": "per_request_spec_decode_metrics",
    "lora": "lora_config",
    "speculative": "speculative_config",
    "kv_transfer": "kv_transfer_config",
    "ec_transfer": "ec_transfer_config",
    "kv_events": "kv_events_config",
    "quant": "quant_config",
}
"""vLLM's names of what cases call by shorter ones."""
PARTS = (
    "parallel_config",
    "model_config",
    "cache_config",
    "scheduler_config",
    "observability_config",
)


def configuration(**changes: Any) -> Any:
    """The VllmConfig of a tiny model, as if it were that of SERVED, with changes."""
    real = config()
    left = {NAMES.get(name, name): value for name, value in changes.items()}
    left = {name: value for name, value in left.items() if name not in FlyingConfig.model_fields}
    if "speculative_config" in left:
        left["speculative_config"] = left["speculative_config"]()
    parts: dict[str, Any] = {}
    for part in PARTS:
        own = {name: left.pop(name) for name in [*left] if hasattr(getattr(real, part), name)}
        parts[part] = Changed(getattr(real, part), **SERVED.get(part, {}) | own)
    heads = Changed(real.model_config.model_arch_config, total_num_attention_heads=8)
    parts["model_config"].model_arch_config = heads
    compiled = Changed(real.compilation_config, mode=CompilationMode.VLLM_COMPILE)
    return Changed(real, compilation_config=compiled, **parts, **left)


@functools.cache
def _ngram() -> SpeculativeConfig:
    served = config()
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=4,
        target_model_config=served.model_config,
        target_parallel_config=served.parallel_config,
    )


def speculation(**changes: Any) -> Callable[[], Any]:
    """Return what makes vLLM's SpeculativeConfig: cases are listed before there is a model."""
    return lambda: Changed(_ngram(), **changes)


def adapters(**changes: Any) -> LoRAConfig:
    """vLLM's LoRAConfig."""
    return LoRAConfig(**changes)


def execution(**changes: Any) -> None:
    """How steps run: the flags of vLLM and of us."""
    settings = {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode.NONE}
    asked = {key: value for key, value in changes.items() if key in FlyingConfig.model_fields}
    real = config()
    devices = changes.get("devices", 1)
    made = Changed(
        real,
        model_config=Changed(real.model_config, enforce_eager=False),
        parallel_config=Changed(real.parallel_config, tensor_parallel_size=devices),
        compilation_config=Changed(
            real.compilation_config,
            **{key: changes.get(key, value) for key, value in settings.items()},
        ),
    )
    settle_execution(made, FlyingConfig(**asked), "shm")


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
    plan(machine(8), variables, engines=2, devices=1)


def starting() -> None:
    """vLLM's server at its start, on a port that another has."""
    with explain_mistakes(SimpleNamespace(model="m", host="127.0.0.1", port=8000)):
        raise OSError(errno.EADDRINUSE, "Address already in use")


@functools.cache
def serve_parser() -> Any:
    """The parser of `serve`."""
    return make_parser("flying-serving serve")


def help_of(word: str) -> None:
    """`--help=WORD`, which vLLM's parser keeps for the next call."""
    with patch.object(FlexibleArgumentParser, "_search_keyword", None):
        serve_parser().parse_args([f"--help={word}"])


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
    """Features of vLLM and of us."""
    asked = {key: value for key, value in changes.items() if key in FlyingConfig.model_fields}
    refuse_unsupported(configuration(**changes), FlyingConfig(**asked), clients)


def _lent(sizes: tuple[int, ...]) -> LentMemory:
    flying = FlyingConfig(lend_weights=True)
    deployment = Deployment(run_dir="", engines=4, devices=1, group_sizes=sizes, flying=flying)
    return LentMemory(deployment, 1, 0)


def lending(sizes: tuple[int, ...]) -> None:
    """A worker of four engines that may lend its weights."""
    _lent(sizes)


def lending_of(**changes: Any) -> None:
    """A server that may lend the weights of a model."""
    features(lend_weights=True, **changes)


def lending_to_kinds() -> None:
    """The same, of a model whose KV is not one memory."""
    kv: Any = SimpleNamespace(kv_cache_groups=[object(), object()])
    _lent((1, 2, 4)).refuse(kv)
