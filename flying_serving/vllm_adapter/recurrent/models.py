"""What a model with recurrent state needs of vLLM's settings."""

from typing import Any

from flying_serving.log import logger


def has_state(model: Any) -> bool:
    """Return whether a model (vLLM's ModelConfig) has layers with recurrent state."""
    return bool(model.is_hybrid or model.has_inner_state)


def cache_no_states(config: Any) -> None:
    """Let vLLM cache no prefix of a model with recurrent state, and log that.

    vLLM would keep states at borders of blocks, which differ between lanes.
    """
    cache, model = config.cache_config, config.model_config
    if not has_state(model) or not cache.enable_prefix_caching:
        return
    logger.warning(
        "--no-enable-prefix-caching: set, as %s has recurrent state, of which no prefix is cached",
        model.architecture,
    )
    cache.enable_prefix_caching = False
    cache.mamba_cache_mode = "none"
    cache.mamba_block_size = model.max_model_len


def refusal_of_itself(problem: str, args: Any) -> str:
    """Return one line on a flag that vLLM itself sets for a model with recurrent state, and then
    refuses; "" if `problem` is none of that. `args`: the flags that were given.
    """
    if "--mamba-block-size" not in problem or getattr(args, "mamba_block_size", None) is not None:
        return ""
    return (
        "--model: vLLM turns prefix caching off for this model with recurrent state, and then "
        f"refuses the flag that it has set itself: {problem}"
    )
