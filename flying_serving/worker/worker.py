"""vLLM's worker with lanes: lane 1 is the worker as it is, each further lane another runner over
the same bytes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.comm.pulse import Pulse
from flying_serving.comm.watchdog import Watchdog
from flying_serving.config import Deployment, deployment_of
from flying_serving.memory.arena import Arena
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.cuda_device import CudaDevice, cuda_driver
from flying_serving.memory.kv_view import bytes_of
from flying_serving.start_error import told_to_server
from flying_serving.vllm_adapter.cpu_build import amx
from flying_serving.vllm_adapter.distributed import nccl
from flying_serving.vllm_adapter.distributed.world import TorchWorld
from flying_serving.vllm_adapter.kv.cache import kv_memory_from
from flying_serving.vllm_adapter.kv.windows import all_are_local
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.patches import installer, tensor_parallel
from flying_serving.vllm_adapter.processes.queues import note_in
from flying_serving.vllm_adapter.request_kinds import adapt_runner
from flying_serving.vllm_adapter.weights import loading
from flying_serving.weights.lending.heap import give_back_freed
from flying_serving.weights.lending.lent_memory import extents, own_blocks_of
from flying_serving.worker.calibration import calibrate_lanes
from flying_serving.worker.checks import LaneChecks, most_requests
from flying_serving.worker.contexts import PeerContexts, open_context, reach_memory
from flying_serving.worker.graphs import LaneGraphs
from flying_serving.worker.lanes import DeviceLanes, log_progress
from flying_serving.worker.memory_items import MemoryItems
from flying_serving.worker.parent import end_with_parent, leave_signals_to_parent
from flying_serving.worker.refusals import refuse_not_causal, refuse_without_kv


class LaneWorker:
    """The additions to vLLM's worker that every device needs. Mixed in before vLLM's class for the
    device.
    """

    pack_weights = False
    """True: the weights are kept in packed units (CPU). False: whole, with views (see
    weights/storage.py).
    """
    maps_kv = False
    """True if the KV memory is an arena (CPU, or where weights may be lent)."""
    cuda: CudaDevice | None = None
    """The device whose memory weights lend to KV; None: on the CPU, or none may be lent."""
    kv_arena: Arena | CudaArena | None = None
    memory_log: MemoryItems | None = None
    """What the start takes of the device beside KV; None on the CPU."""
    own_kv_bytes = 0
    """Bytes of KV memory without any lent weights."""

    def init_device(self) -> None:
        """Join the device's `TorchWorld`, and get a communicator for each group."""
        end_with_parent()
        installer.install()
        worker: Any = self
        deployment = self.deployment = deployment_of(worker.vllm_config.additional_config)
        self.engine = worker.parallel_config.data_parallel_index
        note_in(deployment.run_dir, self.engine)
        self._say(f"joining {deployment.engines} engines of {deployment.devices} devices")
        world = TorchWorld(deployment, self.engine, worker.rank)
        with world.joined():
            super().init_device()  # type: ignore[misc]
        self.memory_log = self.memory_items()
        self.communicators = CommunicatorPool(
            self.engine,
            worker.rank,
            engines=deployment.engines,
            devices=deployment.devices,
            sizes=deployment.group_sizes,
            make=world.coordinator,
            activate=tensor_parallel.activate,
        )
        tensor_parallel.set_home(self.communicators.coordinator(1))
        if not deployment.one_world:
            self._choose_ends()
        self.communicators.open(deployment)
        if not deployment.starts_alone:
            self.communicators.warm()
        if deployment.devices > 1:
            Pulse(deployment.run_dir, deployment.engines, deployment.devices).beat(
                self.engine, worker.rank
            )
        self._taken("communicators of groups")

    def memory_items(self) -> MemoryItems | None:
        """Return what measures the device's memory, once there is a device; None on the CPU."""
        return None

    def _say(self, what: str) -> None:
        worker: Any = self
        log_progress(self.engine, worker.rank, what)

    def _taken(self, item: str) -> None:
        if self.memory_log is not None:
            self.memory_log.taken(item)

    def _choose_ends(self) -> None:
        """Say how groups exchange that need no common torch world."""
        worker: Any = self
        deployment = self.deployment
        run_dir, deadline_s = deployment.run_dir, deployment.flying.collective_timeout_s
        if deployment.collectives != "pynccl":
            self.communicators.use_shared_memory(run_dir, deadline_s)
            return
        member = nccl.NcclMember(self.engine, worker.device, deadline_s, Watchdog.of(deployment))
        self.communicators.use_ends(run_dir, member.open_end)

    def load_model(self, **options: Any) -> None:
        """Load lane 1 as vLLM does, then share its weights with the other lanes."""
        worker: Any = self
        self._say("loading the model")
        with loading.keep_weights():
            super().load_model(**options)  # type: ignore[misc]
        self._taken("the model")
        adapt_runner(worker.model_runner, self.deployment.run_dir, self.engine)
        with told_to_server(self.deployment.run_dir, self.engine):
            self.lanes = DeviceLanes(
                DeviceLane(
                    worker.model_runner, worker.vllm_config, (self.engine,), self.communicators
                ),
                self.deployment,
                worker.rank,
                pack_weights=self.pack_weights,
                cuda=self.cuda,
            )
            self.lane_checks = LaneChecks(
                self.lanes.values(),
                self._say,
                self.lanes.input_rounding,
                eager_where_refused=self.deployment.eager_where_refused,
            )
            self.lane_graphs = LaneGraphs(
                self.lanes.values(),
                self._say,
                eager_where_refused=self.deployment.eager_where_refused,
            )
        self._taken("lanes of groups")

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return the KV that lane 1's layers need: of all tokens, if they see a window only."""
        with told_to_server(self.deployment.run_dir, self.engine):
            refuse_without_kv(self.lanes[1])
        if all_are_local(super().get_kv_cache_spec()):  # type: ignore[misc]
            self._say("every layer has a window; KV of all tokens is kept")
        return self.lanes[1].kv.specs()

    def determine_available_memory(self) -> int:
        """Return the bytes for KV: vLLM's own figure without the groups' CUDA graphs, plus the
        weights that may make room for KV.
        """
        self.own_kv_bytes = int(super().determine_available_memory())  # type: ignore[misc]
        # there after a profile run on CUDA, and then lane 1's is in vLLM's figure
        of_lane1 = getattr(self, "cudagraph_memory_estimate", 0)
        self.own_kv_bytes -= self.lane_graphs.bytes_of_groups(of_lane1)
        return self.own_kv_bytes + self.lanes.lent.most_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory once, in lane 1, and let the other lanes read the same bytes."""
        with told_to_server(self.deployment.run_dir, self.engine):
            refuse_not_causal(self.lanes[1])
            self.lanes.lent.refuse(kv_cache_config)
        allocate = partial(self._allocate_kv, kv_cache_config)
        with kv_memory_from(allocate) if self.maps_kv else nullcontext():
            kv = self.lanes[1].kv.with_sharing_layers(kv_cache_config)
            super().initialize_from_config(kv)  # type: ignore[misc]
        with told_to_server(self.deployment.run_dir, self.engine):
            self.lanes.bind_kv(kv_cache_config, self.kv_arena, self.own_kv_bytes)
            self.lanes.announce_kv(self.deployment.run_dir, self.kv_arena)

    def _allocate_kv(self, kv: KVCacheConfig, size_bytes: int) -> torch.Tensor:
        """Allocate KV memory that peers can map, and that lent weights can make room for."""
        if self.cuda is None:
            host_arena = self.kv_arena = Arena(f"flying-kv-{self.engine}", size_bytes)
            return bytes_of(host_arena.bytes)
        arena = self.kv_arena = CudaArena(self.cuda, size_bytes)
        own = extents(kv, range(own_blocks_of(kv, self.own_kv_bytes)))
        for extent in own:
            arena.back(*extent)
        memory = arena.tensor(0, size_bytes)
        for first_byte, extent_bytes in own:
            memory[first_byte : first_byte + extent_bytes].zero_()
        return memory

    def compile_or_warm_up_model(self) -> Any:
        """Check that lanes compute the same as lane 1, warm lane 1 as vLLM does, then the others.
        Capture CUDA graphs if they are asked for, and measure all lanes.

        An engine that is started again while others run gets none of their time for that: its first
        start did it.
        """
        first = not self.deployment.starts_alone
        with told_to_server(self.deployment.run_dir, self.engine):
            self.lane_checks.compare_compiled(self.lanes.blocks)
            if first:
                self.check_lanes()
                self.lane_graphs.prepare()
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if first:
            self.lanes.warm()
        with told_to_server(self.deployment.run_dir, self.engine):
            most = most_requests(self.lanes[1], self.lanes.blocks)
            if first:
                self.lane_graphs.capture(most)
                self._say("measuring the steps of each lane")
                self.lanes.calibration = calibrate_lanes(self.lanes, self.lanes.blocks)
            else:
                self.lane_graphs.check_lane1(most)
        self.lanes.seed()
        # it is a process of its own; while it starts, vLLM ends it by a signal
        if self.deployment.devices > 1:
            leave_signals_to_parent()
        freeze_gc_heap()  # vLLM did it before the lanes were measured
        give_back_freed()
        return times

    def check_lanes(self) -> None:
        """Compare each lane with lane 1. Raises LaneError if one differs."""
        self.lane_checks.compare_lanes(self.lanes.blocks)

    def on_lane(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the `DeviceLane` for groups of `size` for the engine, through vLLM's
        `collective_rpc`. Returns its answer.
        """
        return function(self.lanes[size], *args)

    def on_lanes(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the `DeviceLanes`, as `on_lane`."""
        return function(self.lanes, *args)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Apply vLLM's fit of the longest request in all lanes."""
        super().update_max_model_len(max_model_len)  # type: ignore[misc]
        self.lanes.update_max_model_len(max_model_len)

    def shutdown(self) -> None:
        """Leave shared memory, then shut down as vLLM does."""
        if hasattr(self, "communicators"):
            self.communicators.close()
        super().shutdown()  # type: ignore[misc]


def take_place(deployment: Deployment, engine: int, device: int) -> None:
    """Bind this process to the cores of a device, before vLLM's worker is made, which binds
    memory to the node of the first CPU.

    Raises:
        ConfigError: as `Deployment.place`; the server is told.
    """
    with told_to_server(deployment.run_dir, engine):
        threads = deployment.place(engine, device)
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


class FlyingCPUWorker(LaneWorker, CPUWorker):
    """vLLM's CPU worker with lanes: packs weights, and shares KV memory with peers."""

    pack_weights = True
    maps_kv = True

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **kwargs: Any
    ) -> None:
        deployment = deployment_of(vllm_config.additional_config)
        take_place(deployment, vllm_config.parallel_config.data_parallel_index, rank)
        amx.permit()
        super().__init__(vllm_config, local_rank, rank, *args, **kwargs)


class FlyingGPUWorker(LaneWorker, Worker):
    """vLLM's CUDA worker with lanes: keeps each weight in one piece, and has contexts on its peers'
    devices before it sizes its KV memory.
    """

    def init_device(self) -> None:
        """Join the other devices, then open contexts on them: after vLLM has noted the free
        memory.
        """
        super().init_device()
        self.contexts = PeerContexts(self.deployment, self.engine, self.rank)
        with told_to_server(self.deployment.run_dir, self.engine):
            lends = self.deployment.lends
            # arenas of peers are mapped by descriptors, as memory of the peer's device
            self.contexts.open(self.device, open_context if lends else reach_memory)
            self._taken("contexts on the devices of peers")
            if lends:
                self.cuda, self.maps_kv = CudaDevice(cuda_driver(), self.device.index), True

    def memory_items(self) -> MemoryItems:
        """Return what measures the device's memory."""
        return MemoryItems(lambda: torch.cuda.mem_get_info(self.device)[0], self._say)

    def determine_available_memory(self) -> int:
        """Return the bytes for KV, when the contexts of all peers are there to be counted."""
        with told_to_server(self.deployment.run_dir, self.engine):
            self.contexts.wait()
        return super().determine_available_memory()
