"""Every name of vLLM that Flying Serving replaces, and one of Python's that vLLM calls: the reason,
and the signature that it must have.

A patch wraps a function: its hook gets the original as its first argument. A stand-in is another
value of a module's name for a while. `installer.py` compares each signature with the one written
here, and refuses another vLLM with one clear line. It undoes all replacements, for tests. Nothing
of vLLM is replaced that is not in this file, which
`tests/with_vllm/vllm_adapter/patches/test_table_rebinding.py` checks.
"""

from typing import Any

from flying_serving.config import KEY
from flying_serving.vllm_adapter.patches.patch import HANDED, Patch, StandIn
from flying_serving.vllm_adapter.patches.version import check_version

_HOOKS = "flying_serving.vllm_adapter."
PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.worker.gpu_worker:init_worker_distributed_environment(vllm_config, rank, "
        "distributed_init_method, "
        "local_rank, backend)",
        _HOOKS + "distributed.world:join_world",
        "engines join one torch world in the run directory, or each one of its own, with every "
        "rank alone",
    ),
    Patch(
        "vllm.v1.worker.cpu_worker:init_worker_distributed_environment(vllm_config, rank, "
        "distributed_init_method, "
        "local_rank, backend)",
        _HOOKS + "distributed.world:join_world",
        "the CPU worker has imported the name for itself",
    ),
    Patch(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
        _HOOKS + "weights.loading:pack_layer",
        "weights that lanes share are packed once, in units, not once per layer as a whole",
    ),
    Patch(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod.process_weights_after_loading(self, layer)",
        _HOOKS + "weights.loading:finish_experts",
        "the same for routed experts",
    ),
    Patch(
        "vllm.model_executor.kernels.linear.scaled_mm.cpu:"
        "CPUInt8ScaledMMLinearKernel.process_weights_after_loading(self, layer)",
        _HOOKS + "weights.int8:finish_int8",
        "the same for int8 weights, whose packed format cannot be cut",
    ),
    Patch(
        "vllm.model_executor.layers.quantization.mxfp4:"
        "GptOssMxfp4MoEMethod.process_weights_after_loading(self, layer)",
        _HOOKS + "weights.loading:finish_experts",
        "the same for routed experts in MXFP4",
    ),
    Patch(
        "vllm.model_executor.layers.quantization.mxfp4:"
        "GptOssMxfp4MoEMethod.create_weights(self, layer, num_experts, hidden_size, "
        "intermediate_size_per_partition, params_dtype, extra_weight_attrs)",
        _HOOKS + "weights.loading:create_without_data",
        "modules without weights would be filled with zeros: 60 GB for each degree of a model "
        "of 120 billion parameters",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:allocate_kv_cache(kv_cache_config, device, layout, "
        "kernel_block_sizes)",
        _HOOKS + "kv.cache:allocate_or_share",
        "all lanes of an engine read the same KV bytes",
    ),
    Patch(
        "vllm.v1.worker.gpu.attn_utils:allocate_kv_cache(kv_cache_config, device, layout, "
        "kernel_block_sizes)",
        _HOOKS + "kv.cache:allocate_or_share",
        "the same for the V2 model runner, whose module has imported the name for itself",
    ),
    Patch(
        "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing(self)",
        _HOOKS + "kv.cache:zero_on_cpu",
        "vLLM's CPU kernels multiply the rest of a block, behind a request's last token, by 0: NaN "
        "that another request has left there becomes the output of this one",
    ),
    Patch(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner._zero_block_ids(self, block_ids)",
        _HOOKS + "kv.cache:zero_blocks",
        "the same for layers whose KV differs in size, which vLLM does not zero on the CPU",
    ),
    Patch(
        "vllm.v1.core.kv_cache_utils:_check_enough_kv_cache_memory(available_memory, "
        "get_needed_memory, "
        "max_model_len, estimate_max_model_len)",
        _HOOKS + "kv.cache:check_pooled_memory",
        "--max-model-len may exceed one engine's KV memory if a group can hold it",
    ),
    Patch(
        "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask(input_, "
        "org_vocab_start_index, "
        "org_vocab_end_index, num_org_vocab_padding, added_vocab_start_index, "
        "added_vocab_end_index)",
        _HOOKS + "weights.loading:eagerly",
        "on CPU each engine would compile a few integer operations for seconds at its first "
        "group step",
    ),
    Patch(
        "vllm.model_executor.layers.rotary_embedding.base:"
        "RotaryEmbedding.forward_cpu(self, positions, query, key)",
        _HOOKS + "cpu_build.rotary:rotate_heads",
        "on CPU vLLM's kernel rotates queries and keys of latent attention by the positions of "
        "other tokens",
    ),
    Patch(
        "vllm.v1.sample.sampler:batched_count_greater_than(x, values)",
        _HOOKS + "weights.loading:eagerly",
        "the same for logprobs: the first request for them would wait three seconds in each engine",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens(self, grammar_output)",
        _HOOKS + "cpu_build.sampling:sample_and_rewind",
        "on CPU vLLM dies of a seeded request whose prompt takes more than one step",
    ),
    Patch(
        "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.sync_batch(self, "
        "batch_update)",
        _HOOKS + "cpu_build.sampling:sync_moves",
        "vLLM keeps the state at the target of a one-way move (its #49613 mended swaps alone): the "
        "budget of a request that has ended would force another one to end a thought",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens(x, cu_num_tokens, num_tokens, "
        "replace_from, replace_to)",
        _HOOKS + "cpu_build.expansion:expand_on_cpu",
        "on CPU logits of draft tokens would be divided by memory that was never written",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints(logits, cu_num_draft_tokens, "
        "sampling_metadata)",
        _HOOKS + "cpu_build.expansion:constrain_drafts",
        "on CPU a request with top_k would end its engine in a step in which no request has drafts",
    ),
    Patch(
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request(self, request)",
        _HOOKS + "scheduler.history:add_with_history",
        "a request that goes on in another group has its outputs so far, and has drawn its "
        "random numbers",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict(self, "
        "hidden_states, num_scheduled_tokens)",
        _HOOKS + "lora.layers:prompt_logprobs_by_request",
        "logprobs of a prompt would be computed with the adapters of other requests",
    ),
    Patch(
        "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys(request)",
        _HOOKS + "lora.layers:hash_keys_of_adapter",
        "an adapter that is unloaded, changed in its folder and loaded again would find the "
        "prefixes of its old weights",
    ),
    Patch(
        "multiprocessing.shared_memory:_make_filename()",
        _HOOKS + "processes.queues:name_noted",
        "if all processes of a server are killed, the next start can remove the shared memory that "
        "vLLM has made, whose names vLLM leaves to Python",
    ),
    Patch(
        "vllm.triton_utils.dispatcher:_rebind_kernels(overrides)",
        _HOOKS + "weights.loading:rebind_without_llvmlite",
        "it looks into every module, and fails on llvmlite, which our shared-memory collectives "
        "load (through numba)",
    ),
)

ENTRY_PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client(vllm_config, "
        "executor_class, log_stats, "
        "client_addresses, client_count, client_index, renderer)",
        HANDED + ":make_client",
        "a server whose --additional-config asks for it gets our client, which starts our engines",
    ),
)

REFUSAL = Patch(
    "vllm.config:VllmConfig.__post_init__(self)",
    _HOOKS + "patches.table:refuse_request_for_us",
    "under another vLLM the configuration that asks for it is refused, not ignored",
)

SERVER_PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.engine.utils:get_mp_context()",
        _HOOKS + "api_server.client:fork_on_cpu",
        "engines on CPU are forked from the server, which has imported everything already",
    ),
    Patch(
        "vllm.v1.executor.multiproc_executor:get_mp_context()",
        _HOOKS + "api_server.client:fork_on_cpu",
        "the same for the workers of engines with several devices",
    ),
    Patch(
        "vllm.v1.engine.utils:wait_for_engine_startup(handshake_socket, core_engines, "
        "parallel_config, "
        "coordinated_dp, cache_config, launch)",
        _HOOKS + "api_server.client:start_independent",
        "the engines of an MoE model are as independent as those of a dense one",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig.needs_dp_coordinator(self)",
        _HOOKS + "api_server.client:without_coordinator",
        "one process less: engines are independent, and the client balances them",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.generate(self, prompt, sampling_params, request_id, "
        "prompt_text, "
        "lora_request, tokenization_kwargs, trace_headers, priority, data_parallel_rank, "
        "session_id, kv_hints, "
        "reasoning_ended, reasoning_parser_kwargs)",
        HANDED + ":check_before_stream",
        "a streamed request that no layout can run is HTTP 400, not an error inside a stream "
        "that has begun with 200",
    ),
    Patch(
        "vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion.render_completion_request(self, request)",
        HANDED + ":check_prompts",
        "a call with more prompts than the server ever takes together is HTTP 400, not 429 at "
        "every try",
    ),
    Patch(
        "vllm.entrypoints.openai.chat_completion.batch_serving:"
        "OpenAIServingChatBatch.render_batch_chat_request(self, request)",
        HANDED + ":check_conversations",
        "the same for a batch of chats",
    ),
    Patch(
        "vllm.entrypoints.pooling.base.serving:PoolingBaseServing._prepare_generators(self, ctx)",
        HANDED + ":check_inputs",
        "the same for inputs of /v1/embeddings, /pooling, /classify, /score and /rerank",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.serving:"
        "OpenAIServingResponses._generate_with_builtin_tools(self, "
        "request_id, engine_input, sampling_params, context, tok_params, lora_request, priority, "
        "trace_headers, "
        "session_id, reasoning_parser_kwargs)",
        HANDED + ":check_response",
        "the same for /v1/responses, whose stream calls `generate` when it has begun",
    ),
    Patch(
        "vllm.entrypoints.openai.responses.api_router:_convert_stream_to_sse_events(generator)",
        HANDED + ":end_by_event",
        "a stream of /v1/responses that fails ends with an event `error`, not with a broken "
        "connection",
    ),
    Patch(
        "vllm.entrypoints.openai.models.serving:"
        "OpenAIServingModels._check_load_lora_adapter_request(self, request)",
        HANDED + ":refuse_reload",
        "`load_inplace` would leave members of a group with different weights of one adapter for "
        "some steps; vLLM answers an error of the engine client with 500",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM._add_request(self, request, prompt, parent_req, "
        "index, queue)",
        _HOOKS + "api_server.client:abort_if_refused",
        "a request that is refused or left while it waits would stay in the output processor, "
        "and in the task pool",
    ),
    Patch(
        "vllm.v1.engine.core_client:_process_utility_output(output, utility_results)",
        _HOOKS + "api_server.client_channel:drop_unawaited",
        "a call that has ended is forgotten, and its answer may be on its way",
    ),
    Patch(
        "vllm.v1.engine.async_llm:AsyncLLM.shutdown(self, timeout)",
        HANDED + ":end_in_order",
        "vLLM's engines drain each by itself, and requests that are left get no answer",
    ),
    Patch(
        "vllm.entrypoints.launchers.app:attach_endpoint_plugins(app, supported_tasks)",
        HANDED + ":add_routes",
        "the admin routes, and Retry-After",
    ),
    Patch(
        "vllm.entrypoints.launchers.api_server.app_state:"
        "init_endpoint_plugins_state(engine_client, state, args)",
        HANDED + ":tell_rights",
        "what clients may set depends on whether there is an API key, which the engine client is "
        "not told",
    ),
)

_ENGINE_CLASS = _HOOKS + "patches.engine_class:engine_classes"
_ACTIVATE = _HOOKS + "patches.tensor_parallel:activate"
ENGINE_CLASSES = (
    StandIn(
        "vllm.v1.engine.core:EngineCoreProc(vllm_config, local_client, handshake_address, "
        "executor_class, log_stats, "
        "client_handshake_address, tensor_queue, engine_index)",
        _ENGINE_CLASS,
        "engines have lanes; vLLM has no setting for their class",
    ),
    StandIn(
        "vllm.v1.engine.core:DPEngineCoreProc(vllm_config, local_client, handshake_address, "
        "executor_class, log_stats, "
        "client_handshake_address, tensor_queue)",
        _ENGINE_CLASS,
        "the same for MoE models, whose engines vLLM would couple",
    ),
)
TENSOR_PARALLEL_GROUPS = (
    StandIn(
        "vllm.distributed.parallel_state:_TP",
        _ACTIVATE,
        "in a step of a lane vLLM's layers exchange with the members of its group",
    ),
    StandIn(
        "vllm.distributed.parallel_state:_ETP",
        _ACTIVATE,
        "vLLM has a second name for the same group",
    ),
)
STAND_INS: tuple[StandIn, ...] = (*ENGINE_CLASSES, *TENSOR_PARALLEL_GROUPS)


def refuse_request_for_us(original: Any, self: Any) -> None:
    """Wrap `VllmConfig.__post_init__`. Raises HookError if the configuration asks for Flying
    Serving.
    """
    if isinstance(self.additional_config, dict) and KEY in self.additional_config:
        check_version()
    original(self)
