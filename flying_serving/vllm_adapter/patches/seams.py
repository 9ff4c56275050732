"""Methods of vLLM that our subclasses override or call: not patched, but their signatures have to
stay.
"""

SEAMS = (
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core(args, dp_rank, local_dp_rank, kwargs)",
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop(self)",
    "vllm.v1.engine.core:EngineCoreProc._handle_shutdown(self)",
    "vllm.v1.engine.core:EngineCoreProc._reject_add_in_shutdown(self, request)",
    "vllm.v1.engine.core:EngineCoreProc._reject_utility_in_shutdown(self, client_idx, call_id, "
    "method_name)",
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler(self, mode, clear_cache)",
    "vllm.v1.engine.core:EngineCore.resume_scheduler(self)",
    "vllm.v1.engine.core:EngineCoreProc.process_input_sockets(self, input_addresses, "
    "coord_input_address, identity, "
    "ready_event)",
    "vllm.v1.engine.core:EngineCore._initialize_kv_caches(self, vllm_config)",
    "vllm.v1.engine.core:EngineCore.add_request(self, request, request_wave)",
    "vllm.v1.engine.core:EngineCore.abort_requests(self, request_ids)",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request(self, request)",
    "vllm.v1.engine.core_client:AsyncMPClient.add_request_async(self, request)",
    "vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async(self, request_ids)",
    "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async(self, method, args, engine)",
    "vllm.v1.engine.core_client:AsyncMPClient.get_output_async(self)",
    "vllm.v1.request:Request.append_output_token_ids(self, token_ids)",
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens(self, request, new_token_ids)",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks(self, num_blocks)",
    "vllm.v1.core.block_pool:BlockPool.free_blocks(self, ordered_blocks)",
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls(self)",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output(self, scheduler_output, "
    "model_runner_output)",
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit(self, request)",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks(self, request)",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request(self, request)",
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request(self, request)",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests(self, request_ids, finished_status)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(self, block_ids)",
    "vllm.lora.worker_manager:WorkerLoRAManager.add_adapter(self, adapter_request)",
    "vllm.lora.worker_manager:WorkerLoRAManager.set_active_adapters(self, requests, mapping)",
    "vllm.v1.core.sched.scheduler:Scheduler._get_new_block_ids_to_zero(self)",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request(self, request, timestamp, "
    "drop_stale_output)",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule(self, scheduler_output)",
    "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output(self, request, "
    "new_token_ids, is_stale)",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids(self, draft_token_ids)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids(self, request_id)",
    "vllm.v1.structured_output:StructuredOutputManager.validate_tokens(self, request, spec_tokens)",
    "vllm.v1.spec_decode.ngram_proposer:_find_longest_matched_ngram_and_propose_tokens("
    "origin_tokens, min_ngram, max_ngram, max_model_len, k)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.take_draft_token_ids(self)",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats(self, spec_decoding_stats, "
    "kv_connector_stats, "
    "cudagraph_stats, perf_stats, ec_connector_stats)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model(self, scheduler_output, "
    "intermediate_tensors)",
    "vllm.v1.worker.cpu_worker:CPUWorker.__init__(self, vllm_config, local_rank, rank, "
    "distributed_init_method, "
    "is_driver_worker)",
    "vllm.utils.argparse_utils:FlexibleArgumentParser.format_help(self)",
    "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(self, rank, local_rank)",
    "vllm.distributed.parallel_state:_get_unique_name(name)",
    "vllm.distributed.parallel_state:_register_group(group)",
    "vllm.distributed.parallel_state:GroupCoordinator.__init__(self, group_ranks, local_rank, "
    "torch_distributed_backend, use_device_communicator, use_message_queue_broadcaster, "
    "group_name, use_all2all)",
    "vllm.distributed.parallel_state:GroupCoordinator.all_reduce(self, input_)",
    "vllm.distributed.parallel_state:GroupCoordinator.all_gather(self, input_, dim)",
    "vllm.distributed.parallel_state:GroupCoordinator.gather(self, input_, dst, dim)",
    "vllm.distributed.parallel_state:GroupCoordinator.broadcast(self, input_, src)",
    "vllm.distributed.parallel_state:GroupCoordinator.destroy(self)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__(self, group, device, "
    "library_path)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.all_reduce(self, in_tensor, "
    "out_tensor, op, stream)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.all_gather(self, "
    "output_tensor, input_tensor, stream)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast(self, tensor, src, "
    "stream)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.send(self, tensor, dst, "
    "stream)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.recv(self, tensor, src, "
    "stream)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.group_start(self)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.group_end(self)",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.destroy(self)",
)
"""Signatures in the form of `Patch.original`."""
