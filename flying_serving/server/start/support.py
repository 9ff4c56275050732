"""Refusals at start of settings that this version or a model does not admit, in one line that names
the flag.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from flying_serving.config import MAX_ENGINES
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.layout.groups import is_power_of_two
from flying_serving.layout.shards import degree_obstacle
from flying_serving.log import logger
from flying_serving.vllm_adapter.kv_heads import kv_head_counts, latents_on_cpu

MAX_PORT = 65535
MODEL_FILES = ("config.json", "params.json")
_NAME = re.compile(r"[\w-][\w.:-]*(/[\w-][\w.:-]*)?")
"""A model's name on Hugging Face: `owner/model`, or `model` alone."""
SPECULATION = "ngram"
"""The method of speculation that lanes serve."""
Obstacles = Callable[[Any, Sequence[int]], Mapping[int, str]]
"""Returns why a model does not admit some group sizes, each above 1: see
`flying_serving.worker.admission.obstacles`.
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


def no_model(model: str, reason: str) -> ConfigError:
    """Return the one-line error for a name that no hub has, or gives out."""
    return ConfigError(
        f"--model={model}: there is no such directory, and no model of that name is available: "
        f"{reason}"
    )


def refuse_unsupported(config: Any, client_count: int) -> None:
    """Raise Unsupported for the first feature of this VllmConfig that lanes do not serve yet."""
    from vllm.utils.torch_utils import is_quantized_kv_cache

    from flying_serving.worker.binding import expert_forms, formats

    parallel, model = config.parallel_config, config.model_config
    causal = getattr(model.hf_text_config, "is_causal", True)
    refusals: Sequence[tuple[bool, str, str]] = (
        *(() if config.lora_config is None else _lora_refusals(config)),
        *(() if config.speculative_config is None else _speculation_refusals(config)),
        (
            model.supports_multimodal_inputs,
            "--language-model-only=False",
            f"images, video and audio ({model.architecture})",
        ),
        (
            model.is_encoder_decoder,
            "--model",
            f"models with an encoder and a decoder ({model.architecture})",
        ),
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size", "pipeline parallelism"),
        (
            parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size",
            "context parallelism",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size",
            "context parallelism",
        ),
        (parallel.enable_expert_parallel, "--enable-expert-parallel", "expert parallelism"),
        (parallel.enable_elastic_ep, "--enable-elastic-ep", "elastic expert parallelism"),
        # vLLM makes a connector of it, which the next line would refuse by another name
        (
            config.cache_config.kv_offloading_size is not None,
            "--kv-offloading-size",
            "KV that is offloaded",
        ),
        (config.kv_transfer_config is not None, "--kv-transfer-config", "KV connectors"),
        (config.ec_transfer_config is not None, "--ec-transfer-config", "encoder cache connectors"),
        (config.kv_events_config is not None, "--kv-events-config", "KV events"),
        (
            model.quantization is not None
            and model.quantization not in (*formats.METHODS, *expert_forms.METHODS),
            "--quantization",
            f"quantization by {model.quantization}",
        ),
        (
            getattr(config.quant_config, "kv_cache_scheme", None) is not None,
            "--model",
            "KV that the checkpoint quantizes (kv_cache_scheme)",
        ),
        (client_count > 1, "--api-server-count", "more than one API server (use 1)"),
        (parallel.nnodes > 1, "--nnodes", "more than one node"),
        (
            parallel.data_parallel_external_lb,
            "--data-parallel-external-lb",
            "an external load balancer",
        ),
        (parallel.data_parallel_hybrid_lb, "--data-parallel-hybrid-lb", "a hybrid load balancer"),
        (
            has_state(model) and parallel.tensor_parallel_size > 1,
            "--tensor-parallel-size",
            f"models with recurrent state ({model.architecture}) on engines of several devices",
        ),
        (
            model.use_mla and is_quantized_kv_cache(config.cache_config.cache_dtype),
            "--kv-cache-dtype",
            "KV in 8 bits of latent attention (MLA)",
        ),
        (
            latents_on_cpu(config) is not None,
            "--model",
            f"latents and rotated keys of {latents_on_cpu(config)} numbers on a CPU",
        ),
        (
            hasattr(model.hf_text_config, "index_topk"),
            "--model",
            f"sparse attention, whose indexer has a cache of its own ({model.architecture})",
        ),
        (not causal, "--model", f"attention that is not causal ({model.architecture})"),
        (model.enable_sleep_mode, "--enable-sleep-mode", "sleep mode"),
    )
    for is_asked, flag, what in refusals:
        if is_asked:
            raise Unsupported(f"{flag}: {what} cannot be served by Flying Serving yet")


def _lora_refusals(config: Any) -> Sequence[tuple[bool, str, str]]:
    """Return, of a VllmConfig with adapters: whether it asks for something that lanes do not serve
    yet, by which flag, and what.
    """
    lora, model = config.lora_config, config.model_config
    targets = lora.target_modules
    return (
        # vLLM's Triton kernels read whole tensors only, and a lane has views
        (not current_platform.is_cpu(), "--enable-lora", "LoRA on this kind of device"),
        (config.use_v2_model_runner, "--enable-lora", "LoRA with vLLM's V2 model runner"),
        (lora.fully_sharded_loras, "--fully-sharded-loras", "adapters that ranks cut further"),
        (is_pooling(model), "--enable-lora", "LoRA for pooling models"),
        (model.use_mla, "--enable-lora", "LoRA with latent attention"),
        (has_state(model), "--enable-lora", "LoRA with recurrent state"),
        (model.is_multimodal_model, "--enable-lora", "LoRA for models that see or hear"),
        (
            model.is_moe and (targets is None or "experts" in targets),
            "--enable-lora",
            f"adapters of routed experts ({model.architecture}; --lora-target-modules can name "
            "other layers)",
        ),
    )


def _speculation_refusals(config: Any) -> Sequence[tuple[bool, str, str]]:
    """Return the same of a VllmConfig with speculation."""
    speculative, model = config.speculative_config, config.model_config
    method, flag = speculative.method, "--speculative-config"
    rejection = speculative.rejection_sample_method
    return (
        (
            method != SPECULATION,
            flag,
            f"speculation by {method} (method {SPECULATION} is served)",
        ),
        (rejection != "standard", flag, f"rejection_sample_method {rejection}"),
        (
            bool(speculative.num_speculative_tokens_per_batch_size),
            flag,
            "drafts whose number depends on the batch (num_speculative_tokens_per_batch_size)",
        ),
        (not current_platform.is_cpu(), flag, "speculation on this kind of device"),
        (config.use_v2_model_runner, flag, "speculation with vLLM's V2 model runner"),
        (is_pooling(model), flag, "speculation for pooling models"),
        (model.use_mla, flag, "speculation with latent attention"),
        (has_state(model), flag, "speculation with recurrent state"),
        (model.is_multimodal_model, flag, "speculation for models that see or hear"),
        (config.lora_config is not None, flag, "speculation with adapters (--enable-lora)"),
        (model.quantization is not None, flag, "speculation with quantized weights"),
        (
            config.parallel_config.tensor_parallel_size > 1,
            "--tensor-parallel-size",
            "speculation on engines of several devices",
        ),
        (
            config.scheduler_config.scheduler_cls is not None,
            "--scheduler-cls",
            "speculation with a scheduler of one's own",
        ),
        *_step_refusals(config),
    )


def _step_refusals(config: Any) -> Sequence[tuple[bool, str, str]]:
    """Return the same of steps that cannot have a request's token and all of its drafts.

    vLLM's engine would end at such a step, or wait for ever.
    """
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    scheduler, drafts = config.scheduler_config, config.speculative_config.num_speculative_tokens
    too_short = f"less than a token and {drafts} drafts of it (num_speculative_tokens)"
    return (
        (
            not scheduler.enable_chunked_prefill,
            "--no-enable-chunked-prefill",
            "speculation where a step has whole prompts",
        ),
        (
            drafts > MAX_SPEC_LEN,
            "--speculative-config",
            f"num_speculative_tokens above {MAX_SPEC_LEN}",
        ),
        (scheduler.max_num_batched_tokens <= drafts, "--max-num-batched-tokens", too_short),
        (
            0 < scheduler.long_prefill_token_threshold <= drafts,
            "--long-prefill-token-threshold",
            too_short,
        ),
        (
            config.observability_config.per_request_spec_decode_metrics != "none",
            "--per-request-spec-decode-metrics",
            "counts of drafts for a request, which may go on in another group",
        ),
    )


def is_pooling(model: Any) -> bool:
    """Return whether a model (vLLM's ModelConfig) gives vectors or scores and no tokens."""
    return bool(model.runner_type == "pooling")


def refuse_lending(config: Any) -> None:
    """Raise Unsupported for a VllmConfig whose weights cannot be lent: `--lend-weights` was set."""
    model = config.model_config
    refusals = (
        (model.use_mla, "latent attention (MLA)"),
        (has_state(model), "recurrent state"),
        (config.lora_config is not None, "adapters (--enable-lora)"),
        (config.speculative_config is not None, "speculation (--speculative-config)"),
    )
    for refused, what in refusals:
        if refused:
            raise Unsupported(f"--lend-weights: models with {what} cannot lend weights yet")


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


def keep_all_kv(config: Any) -> None:
    """Keep all tokens' KV in every layer, in one cache group, also where some layers see a window
    of them only.

    vLLM's hybrid manager would give such layers blocks of their own, and groups of engines share
    one pool of blocks. Where every layer has a window, or some have recurrent state, which needs
    groups of its own, `vllm_adapter/windows.py` keeps all KV.
    """
    config.scheduler_config.disable_hybrid_kv_cache_manager = not has_state(config.model_config)


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
