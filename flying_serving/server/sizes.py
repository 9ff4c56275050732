"""Which group sizes a server offers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flying_serving.config import MAX_ENGINES
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import is_power_of_two
from flying_serving.layout.shards import degree_obstacle

Obstacles = Callable[[Any, Sequence[int]], Mapping[int, str]]
"""Why a model does not admit some group sizes, each above 1: see `flying_serving.worker.admission.obstacles`."""


def choose_group_sizes(
    config: Any, requested: tuple[int, ...] | None, obstacles: Obstacles
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Group sizes that this model and this number of engines allow, and why not the others.

    Raises:
        ConfigError: for a requested size that they do not, with the reason; for a number of engines that is no
            power of two up to 8.
    """
    engines = config.parallel_config.data_parallel_size
    if not is_power_of_two(engines) or engines > MAX_ENGINES:
        raise ConfigError(f"--data-parallel-size={engines}: must be 1, 2, 4 or 8")
    sizes = requested or tuple(size for size in (1, 2, 4, 8) if size <= engines)
    for size in sizes:
        if size > engines:
            raise ConfigError(f"--group-sizes={size}: there are {engines} engines")
    refused = {size: reason for size in sizes if (reason := _heads(config, size)) is not None}
    if wider := [size for size in sizes if size > 1 and size not in refused]:
        refused |= obstacles(config, wider)
    if requested is not None and refused:
        size, reason = min(refused.items())
        raise ConfigError(f"--group-sizes={size}: {reason}")
    return tuple(size for size in sizes if size not in refused), dict(sorted(refused.items()))


def _heads(config: Any, size: int) -> str | None:
    model, devices = config.model_config, config.parallel_config.tensor_parallel_size
    heads = model.model_arch_config.total_num_attention_heads
    if not heads:  # vLLM finds no number of them in this configuration: the layers say themselves how they can be cut
        return None
    return degree_obstacle(size * devices, heads, model.get_total_num_kv_heads())
