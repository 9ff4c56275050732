"""Refusals at start of a missing model, an unusable address and group sizes that a model does not
admit, in one line that names the flag. Settings that follow from the model, and flags that vLLM's
configuration does not keep.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flying_serving.config import MAX_ENGINES
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.layout.shards import degree_obstacle
from flying_serving.vllm_adapter.kv.heads import kv_head_counts
from flying_serving.vllm_adapter.recurrent.models import cache_no_states, has_state

ASYNC_GROUPS_KEY = "flying_serving_async_groups"
"""In `additional_config`: true if the user has set --async-scheduling."""
MAX_PORT = 65535
MODEL_FILES = ("config.json", "params.json")
_NAME = re.compile(r"[\w-][\w.:-]*(/[\w-][\w.:-]*)?")
"""A model's name on Hugging Face: `owner/model`, or `model` alone."""
Obstacles = Callable[[Any, Sequence[int]], Mapping[int, str]]
"""Returns why a model does not admit some group sizes, each above 1: see
`flying_serving.worker.weightless_model.obstacles`.
"""


def refuse_missing_model(model: str) -> None:
    """Raise ConfigError for a path at which there is no model. A possible name on a hub is left to
    vLLM.
    """
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in MODEL_FILES):
            raise ConfigError(f"--model={model}: there is no {MODEL_FILES[0]} in this directory")
    elif path.exists():
        raise ConfigError(
            f"--model={model}: this is a file; must be a model's directory, or its name on "
            "Hugging Face"
        )
    elif "://" not in model and not _NAME.fullmatch(model):
        raise ConfigError(f"--model={model}: neither a directory nor a valid name on Hugging Face")


def refuse_unusable_address(args: Any) -> None:
    """Raise ConfigError for a port that is out of range, and for a file of TLS that is missing.

    `args`: the flags of vLLM's `serve`.
    """
    if not 0 <= args.port <= MAX_PORT:
        raise ConfigError(f"--port={args.port}: must be a whole number from 0 up to {MAX_PORT}")
    for flag in ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs"):
        path = getattr(args, flag.replace("-", "_"))
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"--{flag}={path}: there is no such file")


def asked_of_vllm(args: Any) -> dict[str, bool]:
    """Return what a user has asked of vLLM and its configuration does not keep, by the key in
    `additional_config`. `args`: the flags of vLLM's `serve`.
    """
    return {ASYNC_GROUPS_KEY: args.async_scheduling is True}


def no_model(model: str, reason: str) -> ConfigError:
    """Return the one-line error for a name that no hub has, or gives out."""
    return ConfigError(
        f"--model={model}: there is no such directory, and no model of that name is available: "
        f"{reason}"
    )


def is_pooling(model: Any) -> bool:
    """Return whether a model (vLLM's ModelConfig) gives vectors or scores and no tokens."""
    return bool(model.runner_type == "pooling")


def adapt_caches(config: Any) -> None:
    """Keep all tokens' KV in every layer, in one cache group, also where some layers see a window
    of them only. Cache no states.

    vLLM's hybrid manager would give such layers blocks of their own, and groups of engines share
    one pool of blocks. Where every layer has a window, or some have recurrent state, which needs
    groups of its own, `vllm_adapter/kv/windows.py` keeps all KV.
    """
    config.scheduler_config.disable_hybrid_kv_cache_manager = not has_state(config.model_config)
    cache_no_states(config)


def choose_group_sizes(
    config: Any, requested: tuple[int, ...] | None, obstacles: Obstacles
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the group sizes that this model and this number of engines allow, and why not the
    others.

    Raises:
        ConfigError: for a requested size that they do not allow, with the reason. Also if there are
            not 1, 2, 4 or 8 engines.
    """
    engines = config.parallel_config.data_parallel_size
    if not is_power_of_two(engines) or engines > MAX_ENGINES:
        raise ConfigError(f"--data-parallel-size={engines}: must be 1, 2, 4 or 8")
    sizes = requested or tuple(size for size in (1, 2, 4, 8) if size <= engines)
    for size in sizes:
        if size > engines:
            raise ConfigError(f"--group-sizes={size}: there are {engines} engines")
    refused = {size: reason for size in sizes if (reason := _alone(config, size)) is not None}
    if wider := [size for size in sizes if size > 1 and size not in refused]:
        refused |= obstacles(config, wider)
    if requested is not None and refused:
        size, reason = min(refused.items())
        raise ConfigError(f"--group-sizes={size}: {reason}")
    return tuple(size for size in sizes if size not in refused), dict(sorted(refused.items()))


def _alone(config: Any, size: int) -> str | None:
    """Return why the model has no groups of a size, as far as its configuration tells."""
    if size > 1 and is_pooling(config.model_config):
        return "pooling models run on each engine alone"
    model, devices = config.model_config, config.parallel_config.tensor_parallel_size
    heads = model.model_arch_config.total_num_attention_heads
    # vLLM finds no number of heads in this configuration: the layers tell how they can be cut
    if not heads:
        return None
    reasons = (degree_obstacle(size * devices, heads, count) for count in kv_head_counts(model))
    return next(filter(None, reasons), None)
