"""Features of vLLM that lanes do not serve, and what the program answers at the start."""

from types import SimpleNamespace
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode

from tests.deep.server.errors.case import Case
from tests.deep.server.errors.start_cases import Start
from tests.with_vllm.server.errors.starts import adapters, execution, features, speculation

SHORT_STEP = "less than a token and 4 drafts of it (num_speculative_tokens)"


def _unsupported(flag: str, what: str, **send: Any) -> Start:
    says = f"{flag}: {what} cannot be served by Flying Serving yet"
    return features, Case(what, says, 2, send)


def _speculating(what: str, asked: Any = None, **changes: Any) -> Start:
    return _unsupported("--speculative-config", what, speculative=asked or speculation(), **changes)


def _execution(what: str, says: str, **send: Any) -> Start:
    return execution, Case(what, says, 2, send)


FEATURE_CASES: tuple[Start, ...] = (
    _unsupported("--enable-lora", "LoRA with vLLM's V2 model runner", lora=adapters(), v2=True),
    _unsupported(
        "--enable-lora", "LoRA for pooling models", lora=adapters(), runner_type="pooling"
    ),
    _unsupported("--enable-lora", "LoRA with latent attention", lora=adapters(), use_mla=True),
    _unsupported("--enable-lora", "LoRA with recurrent state", lora=adapters(), is_hybrid=True),
    _unsupported(
        "--enable-lora",
        "LoRA for models that see or hear",
        lora=adapters(),
        is_multimodal_model=True,
    ),
    _unsupported(
        "--fully-sharded-loras",
        "adapters that ranks cut further",
        lora=adapters(fully_sharded_loras=True),
    ),
    _unsupported(
        "--enable-lora",
        "adapters of routed experts (XForCausalLM; --lora-target-modules can name other layers)",
        lora=adapters(),
        is_moe=True,
    ),
    _speculating("speculation by eagle (method ngram is served)", speculation(method="eagle")),
    _speculating(
        "rejection_sample_method synthetic", speculation(rejection_sample_method="synthetic")
    ),
    _speculating(
        "drafts whose number depends on the batch (num_speculative_tokens_per_batch_size)",
        speculation(num_speculative_tokens_per_batch_size=[(1, 8, 4)]),
    ),
    _speculating("speculation with vLLM's V2 model runner", v2=True),
    _speculating("speculation for pooling models", runner_type="pooling"),
    _speculating("speculation with latent attention", use_mla=True),
    _speculating("speculation with recurrent state", is_hybrid=True),
    _speculating("speculation for models that see or hear", is_multimodal_model=True),
    _speculating("speculation with adapters (--enable-lora)", lora=adapters()),
    _speculating("speculation with quantized weights", quantization="gptq"),
    _unsupported(
        "--tensor-parallel-size",
        "speculation on engines of several devices",
        speculative=speculation(),
        tensor_parallel_size=2,
    ),
    _unsupported(
        "--scheduler-cls",
        "speculation with a scheduler of one's own",
        speculative=speculation(),
        scheduler_cls="mine.Scheduler",
    ),
    _speculating("num_speculative_tokens above 128", speculation(num_speculative_tokens=129)),
    _unsupported("--max-num-batched-tokens", SHORT_STEP, speculative=speculation(), step_tokens=4),
    _unsupported(
        "--long-prefill-token-threshold", SHORT_STEP, speculative=speculation(), threshold=4
    ),
    _unsupported(
        "--per-request-spec-decode-metrics",
        "counts of drafts for a request, which may go on in another group",
        speculative=speculation(),
        draft_metrics="summary",
    ),
    _unsupported(
        "--no-enable-chunked-prefill",
        "speculation where a step has whole prompts",
        speculative=speculation(),
        chunked=False,
    ),
    _unsupported("--quantization", "quantization by modelopt_fp4", quantization="modelopt_fp4"),
    _unsupported(
        "--model",
        "KV that the checkpoint quantizes (kv_cache_scheme)",
        quant=SimpleNamespace(kv_cache_scheme={"num_bits": 8}),
    ),
    _unsupported("--pipeline-parallel-size", "pipeline parallelism", pipeline_parallel_size=2),
    _unsupported(
        "--decode-context-parallel-size", "context parallelism", decode_context_parallel_size=2
    ),
    _unsupported(
        "--prefill-context-parallel-size", "context parallelism", prefill_context_parallel_size=2
    ),
    _unsupported("--enable-expert-parallel", "expert parallelism", enable_expert_parallel=True),
    _unsupported("--enable-elastic-ep", "elastic expert parallelism", enable_elastic_ep=True),
    _unsupported(
        "--kv-offloading-size", "KV that is offloaded", offloaded=1.0, kv_transfer=object()
    ),
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
    _execution(
        "`-cc.mode=1`",
        "--compilation-config: mode STOCK_TORCH_COMPILE cannot be served by Flying Serving yet",
        mode=CompilationMode.STOCK_TORCH_COMPILE,
    ),
    (
        features,
        Case(
            "`--no-enforce-eager --lend-weights`",
            "--lend-weights: needs --enforce-eager, as compiled code does not see that a weight is "
            "lent",
            2,
            {"lend_weights": True, "enforce_eager": False},
        ),
    ),
    _execution(
        "`--no-enforce-eager --tensor-parallel-size 2` on the CPU",
        "--tensor-parallel-size=2: needs --enforce-eager, as torch.compile does not know the "
        "collectives shm",
        devices=2,
    ),
    _execution(
        "`--no-cuda-graphs -cc.cudagraph_mode=FULL_AND_PIECEWISE`",
        "--no-cuda-graphs: not together with cudagraph_mode FULL_AND_PIECEWISE of "
        "--compilation-config",
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cuda_graphs=False,
    ),
    _execution(
        "`-cc.cudagraph_mode=PIECEWISE` on CUDA",
        "--compilation-config: cudagraph_mode PIECEWISE cannot be served by Flying Serving yet",
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        cuda_graphs=True,
    ),
    _execution(
        "`--cuda-graphs -cc.cudagraph_mode=NONE`",
        "--cuda-graphs: the cudagraph_mode of --compilation-config must be FULL_DECODE_ONLY, or "
        "FULL_AND_PIECEWISE with mode VLLM_COMPILE, and --enforce-eager must not be given",
        cuda_graphs=True,
    ),
    _unsupported("--enable-sleep-mode", "sleep mode", enable_sleep_mode=True),
    _unsupported(
        "--language-model-only=False",
        "images, video and audio (XForCausalLM)",
        supports_multimodal_inputs=True,
    ),
    _unsupported(
        "--model", "models with an encoder and a decoder (XForCausalLM)", is_encoder_decoder=True
    ),
    _unsupported(
        "--tensor-parallel-size",
        "models with recurrent state (XForCausalLM) on engines of several devices",
        is_hybrid=True,
        tensor_parallel_size=2,
    ),
    _unsupported(
        "--kv-cache-dtype",
        "KV in 8 bits of latent attention (MLA)",
        use_mla=True,
        cache_dtype="fp8",
    ),
    _unsupported(
        "--model",
        "latents and rotated keys of 80 numbers on a CPU",
        use_mla=True,
        get_head_size=lambda: 80,
    ),
    _unsupported(
        "--model",
        "sparse attention, whose indexer has a cache of its own (XForCausalLM)",
        hf_text_config=SimpleNamespace(index_topk=2048),
    ),
    _unsupported(
        "--model",
        "attention that is not causal (XForCausalLM)",
        hf_text_config=SimpleNamespace(is_causal=False),
    ),
)
