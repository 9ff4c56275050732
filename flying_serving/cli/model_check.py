"""`flying-serving doctor MODEL`: start the engines as `serve` would, let them check their lanes, and end them.

With `--load-format dummy` a configuration alone is enough: the engines then have the model's first layers only, with
random weights, and the table counts all of them.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flying_serving.cli.checks import GIB, Finding
from flying_serving.errors import FlyingError
from flying_serving.layout.shards import lane_block_tokens

FEWEST_LAYERS = 2
STEP_TOKENS, STEP_REQUESTS = 64, 8
"""Limits of a step while a configuration alone is checked: what is measured at a start then takes little time."""


@dataclass(frozen=True)
class Started:
    """What the engines of a checked model said.

    Attributes:
        sizes: group sizes whose lanes equal lane 1.
        not_offered: why the model does not admit others.
        blocks: KV blocks of the engine that has fewest, as the whole model would have them.
        block_bytes: of all layers.
        layers: how many were checked, and how many the model has.
    """

    sizes: tuple[int, ...]
    not_offered: dict[int, str]
    blocks: int
    block_bytes: int
    layers: tuple[int, int]


def run(argv: list[str]) -> list[Finding]:
    """Check the model of these flags, which are those of `serve`."""
    from flying_serving.cli import serve

    serve.restart_with_allocator("doctor")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    began = time.monotonic()
    args = serve.parse(argv, "flying-serving doctor")
    try:
        with serve.explained(args):
            config, shortened = _configurations(args)
            started = asyncio.run(_start(_layers(shortened), _layers(config), shortened))
            weight_bytes = _weights(config)
    except FlyingError as error:
        return [Finding("bad", args.model, f"refused: {error}")]
    return list(findings(config, started, weight_bytes, time.monotonic() - began))


def findings(config: Any, started: Started, weight_bytes: int, took_s: float) -> Iterator[Finding]:
    """The table: a row for each group size, and what an engine's memory is used for."""
    model, devices = config.model_config, config.parallel_config.tensor_parallel_size
    checked, layers = started.layers
    part = "" if checked == layers else f", the first {checked} of {layers} layers with random weights"
    yield Finding("ok", model.architecture, f"checked in {took_s:.0f} s{part}")
    yield Finding("ok", "weights", f"{weight_bytes / GIB:.2f} GiB on each device")
    kv_bytes = started.blocks * started.block_bytes
    yield Finding("ok", "KV cache", f"{kv_bytes / GIB:.2f} GiB on each device, {started.blocks} blocks")
    for size in sorted({*started.sizes, *started.not_offered}):
        name = f"group size {size}"
        if size in started.not_offered:
            yield Finding("warn", name, f"not offered: {started.not_offered[size]}")
            continue
        block = lane_block_tokens(config.cache_config.block_size, size, devices, model.get_total_num_kv_heads())
        tokens = max(0, started.blocks - 1) * block
        longest = min(tokens, model.max_model_len)
        yield Finding("ok", name, f"ok, longest context {longest} tokens (its KV holds {tokens})")


def _configurations(args: Any) -> tuple[Any, Any]:
    """vLLM's configuration of the whole model, and of what is to be checked."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    if args.load_format != "dummy":
        return config, copy.deepcopy(config)
    from flying_serving.vllm_hooks.loading import RANDOM_WEIGHTS

    fewer = min(_layers(config), layers_to_check(config.model_config.hf_text_config))
    shorter = copy.copy(args)
    shorter.load_format = RANDOM_WEIGHTS
    shorter.skip_tokenizer_init = True  # there may be none
    shorter.max_num_batched_tokens, shorter.max_num_seqs = STEP_TOKENS, STEP_REQUESTS
    overrides: dict[str, Any] = {"num_hidden_layers": fewer}
    kinds = getattr(config.model_config.hf_text_config, "layer_types", None)
    if kinds:
        overrides["layer_types"] = list(kinds[:fewer])
    shorter.hf_overrides = {**(args.hf_overrides or {}), **overrides}
    return config, AsyncEngineArgs.from_cli_args(shorter).create_engine_config()


def _layers(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def layers_to_check(hf: Any) -> int:
    """How many of the first layers have every kind of layer among them, as far as a configuration tells."""
    kinds = list(getattr(hf, "layer_types", None) or [])
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    dense_first = (getattr(hf, "first_k_dense_replace", None) or 0) + 1
    return max(FEWEST_LAYERS, last_new, dense_first, getattr(hf, "decoder_sparse_step", None) or 0)


def _weights(config: Any) -> int:
    from flying_serving.engine.admission import weight_bytes

    return weight_bytes(config)


async def _start(checked: int, layers: int, shortened: Any) -> Started:
    """Start the engines, which check their lanes, ask nothing of them, and end them."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    client = EngineCoreClient.make_async_mp_client(shortened, Executor.get_class(shortened), log_stats=False)
    try:
        deployment, blocks = client.deployment, client.fewest_blocks
        block_bytes = await client.call_utility_async("flying_block_bytes")
    finally:
        client.shutdown()
    return Started(
        sizes=deployment.group_sizes,
        not_offered=dict(deployment.not_offered),
        blocks=blocks * checked // layers,
        block_bytes=block_bytes * layers // checked,
        layers=(checked, layers),
    )
