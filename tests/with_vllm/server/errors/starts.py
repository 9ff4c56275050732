"""Starts of a server with a wrong flag, variable or model, by the function that refuses it."""

import errno
import functools
from collections.abc import Mapping
from contextlib import chdir
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.config import CompilationMode, CUDAGraphMode
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


def configuration(**changes: Any) -> Any:
    """A VllmConfig as far as a start looks at it: four engines and a model of 8 heads, 4 KV
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
        "supports_multimodal_inputs": False,
        "is_encoder_decoder": False,
        "architecture": "XForCausalLM",
        "runner_type": "generate",
        "quantization": None,
        "use_mla": False,
        "get_head_size": lambda: 576,
        "is_moe": False,
        "is_multimodal_model": False,
        "enable_sleep_mode": False,
        "enforce_eager": True,
        "max_model_len": 4096,
        "get_total_num_kv_heads": lambda: 4,
        "model_arch_config": SimpleNamespace(total_num_attention_heads=8, per_layer_overrides=None),
        "hf_text_config": SimpleNamespace(),
    }
    features = ("lora", "speculative", "kv_transfer", "ec_transfer", "kv_events", "quant")
    return SimpleNamespace(
        use_v2_model_runner=changes.get("v2", False),
        parallel_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in parallel.items()}),
        model_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in model.items()}),
        compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("cache_dtype", "auto"),
            kv_offloading_size=changes.get("offloaded"),
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=changes.get("step_tokens", 2048),
            long_prefill_token_threshold=changes.get("threshold", 0),
            scheduler_cls=changes.get("scheduler_cls"),
            enable_chunked_prefill=changes.get("chunked", True),
        ),
        observability_config=SimpleNamespace(
            per_request_spec_decode_metrics=changes.get("draft_metrics", "none")
        ),
        **{f"{name}_config": changes.get(name) for name in features},
    )


def speculation(**changes: Any) -> SimpleNamespace:
    """vLLM's SpeculativeConfig."""
    served = {
        "method": "ngram",
        "rejection_sample_method": "standard",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": None,
    }
    return SimpleNamespace(**served | changes)


def adapters(**changes: Any) -> SimpleNamespace:
    """vLLM's LoRAConfig."""
    return SimpleNamespace(**{"target_modules": None, "fully_sharded_loras": False} | changes)


def execution(**changes: Any) -> None:
    """How steps run: the flags of vLLM and of us."""
    settings = {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode.NONE}
    asked = {key: value for key, value in changes.items() if key in FlyingConfig.model_fields}
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("devices", 1)),
        compilation_config=SimpleNamespace(
            **{key: changes.get(key, value) for key, value in settings.items()}
        ),
    )
    settle_execution(config, FlyingConfig(**asked), "shm")


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
