"""What a start is refused for: features, those that exclude each other, and what is never served.

This is the one table. The refusals come from it, and so does *Not supported* in docs/serving.md,
which `make zoo ARGS=--page` writes. Features that are in no row together are served together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

from flying_serving.config import FlyingConfig
from flying_serving.errors import UNSERVED, Unsupported
from flying_serving.server.start.support import is_pooling
from flying_serving.vllm_adapter.kv.heads import latents_on_cpu
from flying_serving.vllm_adapter.model_runner.compiled import is_compiled
from flying_serving.vllm_adapter.recurrent.models import has_state
from flying_serving.weights import expert_forms, formats


class Start(NamedTuple):
    """What a start asks for: vLLM's VllmConfig with three of its parts, our settings, and a number
    of API servers.
    """

    config: Any
    model: Any
    parallel: Any
    speculative: Any
    flying: FlyingConfig
    clients: int


@dataclass(frozen=True)
class Feature:
    """Something that a start may ask for.

    Args:
        name: in the documentation.
        is_asked: whether a start asks for it. By default no start does: what refuses it knows more
            than a Start, as the modules of the model or the collectives, and the row only says so.
        flag: by which it is asked. "": the model has it, or the machine.
        words: what a refusal calls it, the name by default; see `refuse_unsupported`.
        beside: the same behind another feature, "with" and the name by default.
    """

    name: str
    is_asked: Callable[[Start], bool] = lambda _: False
    flag: str = ""
    words: str = ""
    beside: str = ""


GPUS = Feature("GPUs", lambda _: not current_platform.is_cpu(), beside="on this kind of device")
POOLING = Feature(
    "pooling models",
    lambda start: is_pooling(start.model),
    beside="for pooling models",
)
LATENT = Feature("latent attention", lambda start: start.model.use_mla)
RECURRENT = Feature(
    "recurrent state",
    lambda start: has_state(start.model),
    words="models with recurrent state ({model.architecture})",
)
SEEING = Feature(
    "models that see or hear",
    lambda start: start.model.is_multimodal_model,
    beside="for models that see or hear",
)
QUANTIZED = Feature("quantized weights", lambda start: start.model.quantization is not None)
KV_8_BITS = Feature(
    "KV in 8 bits",
    lambda start: is_quantized_kv_cache(start.config.cache_config.cache_dtype),
    "--kv-cache-dtype",
)
DEVICES = Feature(
    "engines of several devices",
    lambda start: start.parallel.tensor_parallel_size > 1,
    "--tensor-parallel-size",
    beside="on engines of several devices",
)
V2_RUNNER = Feature("vLLM's V2 model runner", lambda start: start.config.use_v2_model_runner)
COMPILED = Feature("compiled engines", lambda start: is_compiled(start.config))
WHOLE_PROMPTS = Feature(
    "`--no-enable-chunked-prefill`",
    lambda start: not start.config.scheduler_config.enable_chunked_prefill,
    "--no-enable-chunked-prefill",
    beside="where a step has whole prompts",
)
OWN_SCHEDULER = Feature(
    "`--scheduler-cls`",
    lambda start: start.config.scheduler_config.scheduler_cls is not None,
    "--scheduler-cls",
    beside="with a scheduler of one's own",
)
ADAPTERS = Feature(
    "adapters (LoRA)", lambda start: start.config.lora_config is not None, "--enable-lora", "LoRA"
)
SPECULATION = Feature(
    "speculation",
    lambda start: start.speculative is not None,
    "--speculative-config",
)
LENDING = Feature("`--lend-weights`", lambda start: start.flying.lend_weights, "--lend-weights")
TBT_SLO = Feature(
    "`--tbt-slo-ms`", lambda start: start.flying.tbt_slo_ms is not None, "--tbt-slo-ms"
)


class Exclusion(NamedTuple):
    """Two features that are not served together. `says`: the refusal, where the usual one does not
    say enough.
    """

    first: Feature
    second: Feature
    says: str = ""

    def line(self) -> str:
        """Return the refusal."""
        beside = self.second.beside or f"with {self.second.name}"
        what = f"{self.second.flag or self.first.flag}: {self.first.words or self.first.name}"
        return self.says or f"{what} {beside} {UNSERVED}"


EXCLUSIONS = (
    # vLLM's Triton kernels for adapters read whole tensors only, and a lane has views
    Exclusion(ADAPTERS, GPUS),
    Exclusion(ADAPTERS, V2_RUNNER),
    Exclusion(ADAPTERS, POOLING),
    Exclusion(ADAPTERS, LATENT),
    Exclusion(ADAPTERS, RECURRENT),
    Exclusion(ADAPTERS, SEEING),
    Exclusion(SPECULATION, GPUS),
    Exclusion(SPECULATION, V2_RUNNER),
    Exclusion(SPECULATION, POOLING),
    Exclusion(SPECULATION, LATENT),
    Exclusion(SPECULATION, RECURRENT),
    Exclusion(SPECULATION, SEEING),
    Exclusion(
        SPECULATION,
        ADAPTERS,
        f"--speculative-config: speculation with adapters (--enable-lora) {UNSERVED}",
    ),
    Exclusion(SPECULATION, QUANTIZED),
    Exclusion(SPECULATION, DEVICES),
    Exclusion(SPECULATION, OWN_SCHEDULER),
    Exclusion(SPECULATION, WHOLE_PROMPTS),
    Exclusion(RECURRENT, DEVICES),
    Exclusion(
        KV_8_BITS, LATENT, f"--kv-cache-dtype: KV in 8 bits of latent attention (MLA) {UNSERVED}"
    ),
    Exclusion(
        TBT_SLO,
        WHOLE_PROMPTS,
        "--tbt-slo-ms={flying.tbt_slo_ms}: prompts are computed in chunks; chunked prefill is off",
    ),
    Exclusion(
        LENDING,
        LATENT,
        "--lend-weights: models with latent attention (MLA) cannot lend weights yet",
    ),
    Exclusion(
        LENDING, RECURRENT, "--lend-weights: models with recurrent state cannot lend weights yet"
    ),
    Exclusion(
        LENDING,
        ADAPTERS,
        "--lend-weights: models with adapters (--enable-lora) cannot lend weights yet",
    ),
    Exclusion(
        LENDING,
        SPECULATION,
        "--lend-weights: models with speculation (--speculative-config) cannot lend weights yet",
    ),
    Exclusion(
        LENDING,
        COMPILED,
        "--lend-weights: needs --enforce-eager, as compiled code does not see that a weight is "
        "lent",
    ),
)
"""Each pair once."""

_LONG_DRAFTS = "more drafts than a step holds"
_TOO_SHORT = (
    "less than a token and {speculative.num_speculative_tokens} drafts of it "
    "(num_speculative_tokens)"
)
"""vLLM's engine would end at such a step, or wait for ever."""

NEVER: Mapping[Feature | str, tuple[Feature, ...]] = {
    ADAPTERS: (
        Feature(
            "`--fully-sharded-loras`",
            lambda start: start.config.lora_config.fully_sharded_loras,
            "--fully-sharded-loras",
            "adapters that ranks cut further",
        ),
        Feature(
            "routed experts (`--lora-target-modules` can leave them out)",
            lambda start: (
                start.model.is_moe
                and (
                    start.config.lora_config.target_modules is None
                    or "experts" in start.config.lora_config.target_modules
                )
            ),
            "--enable-lora",
            "adapters of routed experts ({model.architecture}; --lora-target-modules can name "
            "other layers)",
        ),
        Feature("in groups: layers that the checkpoint fuses, a vocabulary that ranks pad"),
    ),
    SPECULATION: (
        Feature(
            "methods other than n-grams",
            lambda start: start.speculative.method != "ngram",
            "--speculative-config",
            "speculation by {speculative.method} (method ngram is served)",
        ),
        Feature(
            "a `rejection_sample_method` other than `standard`",
            lambda start: start.speculative.rejection_sample_method != "standard",
            "--speculative-config",
            "rejection_sample_method {speculative.rejection_sample_method}",
        ),
        Feature(
            "`num_speculative_tokens_per_batch_size`",
            lambda start: bool(start.speculative.num_speculative_tokens_per_batch_size),
            "--speculative-config",
            "drafts whose number depends on the batch (num_speculative_tokens_per_batch_size)",
        ),
        Feature(
            _LONG_DRAFTS,
            lambda start: start.speculative.num_speculative_tokens > MAX_SPEC_LEN,
            "--speculative-config",
            f"num_speculative_tokens above {MAX_SPEC_LEN}",
        ),
        Feature(
            _LONG_DRAFTS,
            lambda start: (
                start.config.scheduler_config.max_num_batched_tokens
                <= start.speculative.num_speculative_tokens
            ),
            "--max-num-batched-tokens",
            _TOO_SHORT,
        ),
        Feature(
            _LONG_DRAFTS,
            lambda start: (
                0
                < start.config.scheduler_config.long_prefill_token_threshold
                <= start.speculative.num_speculative_tokens
            ),
            "--long-prefill-token-threshold",
            _TOO_SHORT,
        ),
        Feature(
            "`--per-request-spec-decode-metrics`",
            lambda start: (
                start.config.observability_config.per_request_spec_decode_metrics != "none"
            ),
            "--per-request-spec-decode-metrics",
            "counts of drafts for a request, which may go on in another group",
        ),
    ),
    "speculation, by vLLM": (
        Feature("`--async-scheduling`"),
        Feature("users' logits processors"),
        Feature("requests with `min_p` or `logit_bias`"),
    ),
    LENDING: (
        Feature("quantized linear layers"),
        Feature("experts in FP8"),
        Feature("experts of gpt-oss in MXFP4 on GPUs"),
        Feature("KV of several kinds"),
        Feature("`--group-sizes` without a group of all engines"),
    ),
    LATENT: (
        Feature("a quantized projection of latents"),
        Feature("`--tbt-slo-ms` on CPUs"),
        Feature(
            "on CPUs latents and rotated keys of other sizes than 512 and 64",
            lambda start: latents_on_cpu(start.config) is not None,
            "--model",
            "latents and rotated keys of {latents} numbers on a CPU",
        ),
        Feature("AMX without `--attention-backend CPU_MLA`"),
    ),
    RECURRENT: (Feature("caching of prefixes, which is turned off"),),
    POOLING: (Feature("groups: each engine serves alone"),),
    COMPILED: (
        Feature("groups, which are never compiled"),
        Feature("the mode `STOCK_TORCH_COMPILE`"),
        Feature("several devices without NCCL"),
        Feature("CUDA graphs in [other modes](gpu.md#how-engines-run)"),
    ),
    "models": (
        Feature(
            "images, video and audio (`--language-model-only` serves text)",
            lambda start: start.model.supports_multimodal_inputs,
            "--language-model-only=False",
            "images, video and audio ({model.architecture})",
        ),
        Feature(
            "an encoder and a decoder",
            lambda start: start.model.is_encoder_decoder,
            "--model",
            "models with an encoder and a decoder ({model.architecture})",
        ),
        Feature("no KV (BERT)"),
        Feature(
            "sparse attention with an indexer (DeepSeek V3.2)",
            lambda start: hasattr(start.model.hf_text_config, "index_topk"),
            "--model",
            "sparse attention, whose indexer has a cache of its own ({model.architecture})",
        ),
        Feature(
            "attention that is not causal",
            lambda start: not getattr(start.model.hf_text_config, "is_causal", True),
            "--model",
            "attention that is not causal ({model.architecture})",
        ),
    ),
    "weights": (
        Feature(
            "[other methods of quantization](models.md#which-quantization-works)",
            lambda start: (
                start.model.quantization not in (None, *formats.METHODS, *expert_forms.METHODS)
            ),
            "--quantization",
            "quantization by {model.quantization}",
        ),
        Feature(
            "KV that the checkpoint quantizes",
            lambda start: getattr(start.config.quant_config, "kv_cache_scheme", None) is not None,
            "--model",
            "KV that the checkpoint quantizes (kv_cache_scheme)",
        ),
        Feature("in groups quantized experts but those in FP8 and of gpt-oss"),
        Feature("quantized embeddings and LM heads"),
    ),
    "parallelism": (
        Feature(
            "pipeline parallelism",
            lambda start: start.parallel.pipeline_parallel_size > 1,
            "--pipeline-parallel-size",
        ),
        Feature(
            "context parallelism",
            lambda start: start.parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size",
        ),
        Feature(
            "context parallelism",
            lambda start: start.parallel.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size",
        ),
        Feature(
            "expert parallelism",
            lambda start: start.parallel.enable_expert_parallel,
            "--enable-expert-parallel",
        ),
        Feature(
            "elastic expert parallelism",
            lambda start: start.parallel.enable_elastic_ep,
            "--enable-elastic-ep",
        ),
        Feature("more than eight engines"),
    ),
    "KV elsewhere": (
        # vLLM makes a connector of it, which the next row would refuse by another name
        Feature(
            "KV that is offloaded",
            lambda start: start.config.cache_config.kv_offloading_size is not None,
            "--kv-offloading-size",
        ),
        Feature(
            "KV connectors",
            lambda start: start.config.kv_transfer_config is not None,
            "--kv-transfer-config",
        ),
        Feature(
            "encoder cache connectors",
            lambda start: start.config.ec_transfer_config is not None,
            "--ec-transfer-config",
        ),
        Feature(
            "KV events",
            lambda start: start.config.kv_events_config is not None,
            "--kv-events-config",
        ),
    ),
    "front ends": (
        Feature(
            "a number of API servers other than 1",
            lambda start: start.clients > 1,
            "--api-server-count",
            "more than one API server (use 1)",
        ),
    ),
    "nodes": (
        Feature("more than one node", lambda start: start.parallel.nnodes > 1, "--nnodes"),
        Feature(
            "an external load balancer",
            lambda start: start.parallel.data_parallel_external_lb,
            "--data-parallel-external-lb",
        ),
        Feature(
            "a hybrid load balancer",
            lambda start: start.parallel.data_parallel_hybrid_lb,
            "--data-parallel-hybrid-lb",
        ),
    ),
    "engines": (
        Feature(
            "sleep mode",
            lambda start: start.model.enable_sleep_mode,
            "--enable-sleep-mode",
        ),
    ),
}
"""Features that are refused alone, by what they are of: another feature, which is asked for too, or
a row of the documentation.
"""


def refuse_unsupported(config: Any, flying: FlyingConfig, client_count: int) -> None:
    """Raise Unsupported for the first row of the table that a start asks for.

    Its words may name what a Start has. `latents` is what `latents_on_cpu` returns.

    Args:
        config: vLLM's VllmConfig.
        flying: our settings.
        client_count: of API servers.
    """
    start = Start(
        config,
        config.model_config,
        config.parallel_config,
        config.speculative_config,
        flying,
        client_count,
    )
    together = (
        pair.line()
        for pair in EXCLUSIONS
        if pair.first.is_asked(start) and pair.second.is_asked(start)
    )
    alone = (
        f"{feature.flag}: {feature.words or feature.name} {UNSERVED}"
        for of, features in NEVER.items()
        if isinstance(of, str) or of.is_asked(start)
        for feature in features
        if feature.is_asked(start)
    )
    for line in chain(together, alone):
        raise Unsupported(line.format(**start._asdict(), latents=latents_on_cpu(config)))
