"""vLLM's worker with lanes: lane 1 is the worker as it is, each further lane another runner over the same bytes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.config import deployment_of
from flying_serving.layout.groups import aligned_group
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.transfer import LaneCache, heads_of
from flying_serving.start_error import told_to_server
from flying_serving.vllm_adapter import distributed, loading, table
from flying_serving.vllm_adapter.batches import CHECK_REQUESTS, CHECK_TOKENS, check_steps
from flying_serving.vllm_adapter.kv import token_parts
from flying_serving.worker.binding.share import SharedWeights
from flying_serving.worker.calibration import StepLimits, batches, calibrate
from flying_serving.worker.exchange import KVExchange
from flying_serving.worker.heap import give_back_freed
from flying_serving.worker.lane import Lane, lane_config, refuse_not_causal, run_step, without_layers
from flying_serving.worker.parent import end_with_parent
from flying_serving.worker.progress import phase
from flying_serving.worker.selfcheck import compare, record, require_alike, tolerance


class LaneWorker:
    """What every worker gets beside what vLLM's worker for its device does. Mixed in before that class."""

    pack_weights = False
    """Whether the weights are kept in packed units (CPU) or as loaded, with views (see memory/storage.py)."""

    def init_device(self) -> None:
        """Join the torch world of all engines in place of a world of this engine's own."""
        end_with_parent()
        table.install()
        loading.use_lanes()
        worker: Any = self
        deployment = self.deployment = deployment_of(worker.vllm_config.additional_config)
        self.engine = worker.parallel_config.data_parallel_index
        phase(self.engine, worker.rank, f"joining {deployment.engines} engines of {deployment.devices} devices")
        with distributed.world_of_all_engines(deployment, self.engine, worker.rank):
            super().init_device()  # type: ignore[misc]
        self.pool = CommunicatorPool(
            self.engine,
            worker.rank,
            engines=deployment.engines,
            devices=deployment.devices,
            sizes=deployment.group_sizes,
            make=lambda ranks, name: distributed.make_coordinators(ranks, name, worker.local_rank),
            activate=distributed.activate,
        )
        distributed.set_home(self.pool.coordinator(1))
        if self.pack_weights and deployment.flying.cpu_collectives == "shm":
            flying = deployment.flying
            self.pool.use_shared_memory(deployment.run_dir, flying.collective_timeout_s)
        self.pool.warm()

    def load_model(self, **options: Any) -> None:
        """Load lane 1 as vLLM does, then share its weights with the other lanes."""
        worker: Any = self
        phase(self.engine, worker.rank, "loading the model")
        with loading.keep_weights():
            super().load_model(**options)  # type: ignore[misc]
        with told_to_server(self.deployment.run_dir, self.engine):
            self._build_lanes()

    def _build_lanes(self) -> None:
        worker: Any = self
        phase(self.engine, worker.rank, f"sharing the weights with groups of {list(self.deployment.lanes)} engines")
        config = worker.vllm_config
        heads = config.model_config.get_total_num_kv_heads()
        self.lanes: dict[int, Lane] = {}
        for size in self.deployment.lanes:
            tokens = lane_block_tokens(config.cache_config.block_size, size, self.deployment.devices, heads)
            lane = lane_config(config, size, tokens)
            self.lanes[size] = Lane.build(size, lane, self.pool, self._make_lane_runner)
        self._share_weights()

    def _share_weights(self) -> None:
        model = self.model_runner.model  # type: ignore[attr-defined]
        widest, dtype = self.deployment.widest, self.vllm_config.model_config.dtype  # type: ignore[attr-defined]
        weights = SharedWeights(model, widest, loading.packing(dtype) if self.pack_weights else None)
        shell = self.lanes[widest].runner.model if self.lanes else model
        with set_current_vllm_config(self.lanes[widest].config if self.lanes else self.vllm_config):  # type: ignore[attr-defined]
            weights.share_experts(shell, model)
        for size, lane in self.lanes.items():
            weights.bind(lane.runner.model, aligned_group(self.engine, size).index(self.engine), size)

    def _make_lane_runner(self, config: Any) -> Any:
        lane1: Any = self.model_runner  # type: ignore[attr-defined]
        runner = type(lane1)(config, self.device)  # type: ignore[attr-defined]
        loading.share_embeds(runner, lane1)
        return runner

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory once, in lane 1, and let the other lanes read the same bytes."""
        with told_to_server(self.deployment.run_dir, self.engine):
            specs = self.model_runner.get_kv_cache_spec()  # type: ignore[attr-defined]
            refuse_not_causal(specs.values(), self.vllm_config.model_config.architecture)  # type: ignore[attr-defined]
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self._blocks, self._lane1_kv = kv_cache_config.num_blocks, kv_cache_config
        cache = self.model_runner.kv_caches[0]  # type: ignore[attr-defined]
        storage = cache.untyped_storage()
        buffer = torch.empty(0, dtype=torch.int8, device=cache.device).set_(storage)
        with told_to_server(self.deployment.run_dir, self.engine):
            for lane in self.lanes.values():
                lane.bind_kv(buffer, kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """Check that lanes compute what lane 1 does, warm lane 1 as vLLM does, then each lane, its members together."""
        with told_to_server(self.deployment.run_dir, self.engine):
            self._check_lanes()
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.exchange = self._exchange()
        for lane in self.lanes.values():
            phase(self.engine, self.rank, f"warming up the group of {lane.size}, its members together")  # type: ignore[attr-defined]
            lane.warm()
        with told_to_server(self.deployment.run_dir, self.engine):
            self._calibration = self._calibrate()
        self._move_costs = self._measure_moves()
        give_back_freed()
        return times

    @torch.inference_mode()
    def _check_lanes(self) -> None:
        """Raise LaneError for a lane that differs from lane 1: see `worker/selfcheck.py`."""
        worker: Any = self
        if not self.lanes:
            return
        began = time.monotonic()
        phase(self.engine, worker.rank, "comparing each lane with lane 1")
        config, dtype = worker.vllm_config, worker.model_config.dtype
        scheduler = config.scheduler_config
        most = min(scheduler.max_num_seqs, self._blocks - 1, scheduler.max_num_batched_tokens // CHECK_TOKENS)
        steps = partial(check_steps, min(CHECK_REQUESTS, most), worker.model_config.get_vocab_size())
        lane1 = worker.model_runner
        run = partial(run_step, lane1, grammar=None)
        expected = record(lane1.model, run, steps(config.cache_config.block_size))
        largest = 0.0
        for size, lane in self.lanes.items():
            mine = steps(lane.config.cache_config.block_size)
            found = compare(lane.runner.model, partial(lane.execute, grammar=None), mine, expected)
            agreed = partial(self.pool.any_of, size)
            largest = max(largest, require_alike(size, found, tolerance(dtype), agreed))
        took_s = time.monotonic() - began
        phase(self.engine, worker.rank, f"lanes equal lane 1 within {largest:.1e}; comparing took {took_s:.2f} s")

    @torch.inference_mode()
    def _calibrate(self) -> list[list[float]]:
        phase(self.engine, self.rank, "measuring the steps of each lane")  # type: ignore[attr-defined]
        together = partial(self.pool.any_of, self.deployment.widest)
        limits = StepLimits.of(self.vllm_config, self._blocks)  # type: ignore[attr-defined]
        measured = calibrate(1, batches(limits), partial(run_step, self.model_runner, grammar=None), together)  # type: ignore[attr-defined]
        for size, lane in self.lanes.items():
            limits = StepLimits.of(lane.config, self._blocks)
            measured += calibrate(size, batches(limits), partial(lane.execute, grammar=None), together)
        return measured

    def _exchange(self) -> KVExchange | None:
        """What brings KV from lane to lane; None if the attention backend's blocks cannot be read."""
        worker: Any = self
        heads = worker.vllm_config.model_config.get_total_num_kv_heads()
        lanes = {1: (worker.vllm_config, self._lane1_kv)}
        lanes |= {size: (lane.config, lane.kv_config) for size, lane in self.lanes.items()}
        caches = {}
        for size, (config, kv_config) in lanes.items():
            context = config.compilation_config.static_forward_context
            if len(kv_config.kv_cache_groups) != 1:
                return None
            parts = token_parts([context[name] for name in kv_config.kv_cache_groups[0].layer_names])
            if parts is None:
                return None
            rank = worker.rank * size + self.engine % size
            held = heads_of(rank, self.deployment.devices * size, heads)
            caches[size] = LaneCache(parts, held, kv_config.kv_cache_groups[0].kv_cache_spec.block_size)
        return KVExchange(caches, self.pool, self.engine, worker.rank, self.deployment.devices, heads)

    @torch.inference_mode()
    def _measure_moves(self) -> list[list[float]]:
        if self.exchange is None:
            return []
        together = partial(self.pool.any_of, self.deployment.widest)
        groups = [aligned_group(self.engine, size) for size in self.lanes]
        return [row for group in groups for row in self.exchange.measure(group, self._blocks, together)]

    def move_costs(self) -> list[list[float]]:
        """What moving KV takes, as measured at start: see `KVExchange.measure`. Empty if it cannot move."""
        return self._move_costs

    @torch.inference_mode()
    def tell_moved(self, *args: Any) -> list[int]:
        """`KVExchange.tell`."""
        assert self.exchange is not None
        return self.exchange.tell(*args)

    @torch.inference_mode()
    def move_kv(self, *args: Any) -> None:
        """`KVExchange.move`."""
        assert self.exchange is not None
        self.exchange.move(*args)

    def calibration(self) -> list[list[float]]:
        """What was measured at start: see `worker/calibration.py`."""
        return self._calibration

    def lane_kv_config(self, size: int) -> tuple[Any, KVCacheConfig]:
        """The VllmConfig and the KV configuration that a leader's scheduler for groups of `size` works with.

        They are sent to the engine's process, so no layer and no tensor is in them.
        """
        lane = self.lanes[size]
        assert lane.kv_config is not None
        return without_layers(lane.config), lane.kv_config

    def update_max_model_len(self, max_model_len: int) -> None:
        """Keep the lanes' limit equal to lane 1's when vLLM fits it to the KV memory."""
        super().update_max_model_len(max_model_len)  # type: ignore[misc]
        for lane in self.lanes.values():
            lane.config.model_config.max_model_len = max_model_len
            lane.runner.update_max_model_len(max_model_len)

    def execute_lane(self, size: int, plan: Any, grammar: Any) -> Any:
        """One step in the group of `size` engines; every member calls it with the same plan (its own block ids)."""
        with torch.inference_mode():
            return self.lanes[size].execute(plan, grammar)

    def shutdown(self) -> None:
        """Leave shared memory, then what vLLM does."""
        if hasattr(self, "pool"):
            self.pool.close()
        super().shutdown()  # type: ignore[misc]


class FlyingCPUWorker(LaneWorker, CPUWorker):
    """vLLM's CPU worker with lanes."""

    pack_weights = True


class FlyingGPUWorker(LaneWorker, Worker):
    """vLLM's CUDA worker with lanes."""
