"""All lanes of a worker: built over lane 1's weights and KV memory, checked and measured at start,
stepped later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.config import Deployment
from flying_serving.errors import CollectiveTimeout, GroupBroken, Unsupported
from flying_serving.layout.groups import aligned_group
from flying_serving.layout.parallelism import Parallelism
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.log import logger
from flying_serving.memory.arena import Address, Arena
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.memory.cuda_ipc import share_cuda
from flying_serving.memory.kv_view import KVView
from flying_serving.memory.peers import PeerKV
from flying_serving.memory.shared_arena import SharedArena, share_arena
from flying_serving.vllm_adapter.kv.cache import groups_of, has_kv_alone
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads
from flying_serving.vllm_adapter.kv.views import LaneKV, alike_layers, views_of_lanes
from flying_serving.vllm_adapter.model_runner.runner import Runner
from flying_serving.weights.layouts import hide_compiled_products, shared_weights
from flying_serving.weights.lending.lent_memory import ExtraBlocks, own_blocks_of
from flying_serving.weights.lending.residency import WorkerWeights, in_order, weight_file_of
from flying_serving.wire import CalibrationRow
from flying_serving.worker.calibration import StepLimits, calibrate
from flying_serving.worker.checks import LaneChecks
from flying_serving.worker.graphs import LaneGraphs
from flying_serving.worker.lane import OutputUse, WorkerLane, lane_config


@dataclass(frozen=True)
class VoidStep:
    """The output of a step of which a member is lost, with the reason."""

    why: str


def _unless_broken(step: Callable[[], Any]) -> Any:
    """Return the result of a part of a step; a VoidStep if a member is lost. Raises
    CollectiveTimeout if it lives.
    """
    try:
        return step()
    except CollectiveTimeout:
        raise
    except GroupBroken as error:
        return VoidStep(str(error))


def _tensor_only(deployment: Deployment) -> str | None:
    """Return why no step of the server is to be token parallel; None if steps may be."""
    if not deployment.flying.token_parallel:
        return "--no-token-parallel"
    return "--lend-weights" if deployment.flying.lend_weights else None


def phase(engine: int, device: int, what: str) -> None:
    """Log that an engine begins a phase of its start. The first device logs for all."""
    if device == 0:
        logger.info("engine %d: %s", engine, what)


class WorkerLanes:
    """The lanes of one device of an engine: lane 1 is vLLM's runner as it is, the others share its
    bytes.

    `lane1`: its model is loaded and not yet packed. `pack_weights`: as `LaneWorker.pack_weights`.
    `cuda`: the device whose memory weights and KV exchange; None: they are in memory of the host,
    or none may be lent. `residency`: which weights are resident, if they may be lent. `blocks`: KV
    blocks that have memory while all weights are resident, and that peers may read.
    """

    def __init__(
        self,
        lane1: Runner,
        deployment: Deployment,
        engine: int,
        device: int,
        communicators: CommunicatorPool,
        *,
        pack_weights: bool,
        cuda: CudaDevice | None = None,
    ) -> None:
        self.lane1 = lane1
        self._cuda = cuda
        self.engine, self.engines = engine, deployment.engines
        self.device, self.devices = device, deployment.devices
        self.communicators = communicators
        self.widest = deployment.widest
        config = lane1.config
        self.weight_bytes = sum(weight.nbytes for weight in lane1.model.parameters())
        self.kv_heads = fewest_kv_heads(config.model_config)
        self._say = partial(phase, engine, device)
        self._say(f"sharing the weights with groups of {list(deployment.lanes)} engines")
        self.groups: dict[int, WorkerLane] = {}
        for size in deployment.lanes:
            of_lane = lane_config(
                config, size, self._block_tokens(size), captures=deployment.captures_groups
            )
            self.groups[size] = WorkerLane.build(
                size, of_lane, communicators, lane1, _tensor_only(deployment)
            )
        self.residency: WorkerWeights | None = None
        refused = {"eager_where_refused": deployment.eager_where_refused}
        self.graphs = LaneGraphs(lane1, self.groups, communicators, self._say, **refused)
        self._weight_file = weight_file_of(deployment, engine, device)
        input_rounding = self._share_weights(pack_weights)
        self.checks = LaneChecks(
            lane1, self.groups, communicators, self._say, input_rounding, **refused
        )
        self.blocks = self.own_blocks = 0
        self.extra: ExtraBlocks | None = None
        self.kv_views: dict[int, list[KVView]] = {}
        self.kv_groups = lane1.groups
        self._run_dir = deployment.run_dir
        self.peers = PeerKV(deployment.run_dir, cuda, lane1.device)
        self.calibration: list[CalibrationRow] = []

    def _block_tokens(self, size: int) -> int:
        """Return the tokens of a block in the lane for groups of `size`, from lane 1's present
        size.
        """
        tokens = self.lane1.config.cache_config.block_size
        return lane_block_tokens(tokens, size, self.devices, self.kv_heads)

    def _share_weights(self, pack: bool) -> float:
        """Share lane 1's weights with all lanes. Returns their `input_rounding`."""
        model, file = self.lane1.model, self._weight_file
        weights = shared_weights(self.lane1, self.engine, self.widest, pack, file, self._cuda)
        widest = self.groups[self.widest].runner if self.groups else self.lane1
        with set_current_vllm_config(widest.config):
            weights.complete(widest.model)
        for size, lane in self.groups.items():
            weights.bind(
                lane.runner.model, aligned_group(self.engine, size).index(self.engine), size
            )
        hide_compiled_products(self.lane1, pack)
        if file is not None:
            file.announce()
            self.residency = WorkerWeights(in_order(model, weights.units), self.engine)
        return weights.input_rounding

    def refuse_without_kv(self) -> None:
        """Raise Unsupported if no layer keeps KV, as in BERT, whose tokens see later ones: requests
        are counted by their KV.
        """
        if not self.lane1.kv_specs():
            raise Unsupported(
                f"--model: models without KV ({self.lane1.config.model_config.architecture}) "
                "cannot be served by Flying Serving yet"
            )

    def refuse_not_causal(self) -> None:
        """Raise Unsupported if prompt tokens see later ones: outputs of a migrated request are
        computed as its prompt.

        vLLM serves such models without chunked prefill, and never schedules a prompt that is longer
        than a step. To be called before memory is allocated for KV.
        """
        if any(getattr(spec, "non_causal", False) for spec in self.lane1.kv_specs().values()):
            raise Unsupported(
                "--model: models with attention that is not causal "
                f"({self.lane1.config.model_config.architecture}) "
                "cannot be served by Flying Serving yet"
            )

    def bind_kv(self, lane1_kv: KVCacheConfig) -> None:
        """Let all lanes read the KV bytes that lane 1 has allocated. Raises ConfigError as
        `WorkerLane.bind_kv`.
        """
        self.blocks = lane1_kv.num_blocks
        self.lane1.groups = self.kv_groups = groups_of(lane1_kv)
        memory = self.lane1.kv_bytes()
        lanes = {1: LaneKV(self.lane1, lane1_kv, self.device, self.devices)}
        for size, lane in self.groups.items():
            kv = lane.bind_kv(memory, lane1_kv, self._block_tokens(size))
            rank = self.device * size + self.engine % size
            lanes[size] = LaneKV(lane.runner, kv, rank, self.devices * size)
        kinds = alike_layers(lane1_kv, self.devices, self.lane1.config.model_config)
        self.kv_views = views_of_lanes(lanes, kinds)

    def lendable_bytes(self) -> int:
        """Return the bytes of weights that may make room for KV."""
        return 0 if self.residency is None else sum(self.residency.piece_bytes(self.widest))

    def refuse_kinds_of_kv(self, kv: KVCacheConfig) -> None:
        """Raise Unsupported if weights may be lent and the KV memory would not be one arena."""
        if self.residency is not None and not has_kv_alone(kv):
            raise Unsupported(
                "--lend-weights: the KV of this model is of several kinds: it gets no lent weights"
            )

    def bind_extra(
        self, kv: KVCacheConfig, arena: Arena | CudaArena | None, own_bytes: int
    ) -> None:
        """Use the blocks beyond `own_bytes` of KV memory as extra ones, if weights may be lent."""
        if self.residency is None:
            return
        assert arena is not None
        self.own_blocks = own_blocks_of(kv, own_bytes)
        if not arena.backs_on_use:
            self.blocks = self.own_blocks
        runners = [self.lane1, *(lane.runner for lane in self.groups.values())]
        self.extra = ExtraBlocks(self.lane1.kv_bytes(), kv, arena, runners)

    def announce_kv(self, arena: Arena | CudaArena | None) -> None:
        """Let peers read the KV memory of all lanes: that of `arena`, or the device's own.

        Peers of a CUDA device do not map extra blocks: the driver frees a page only when no process
        maps it.
        """
        if not self.kv_views:
            return
        memory: Address | SharedArena | bytes
        if isinstance(arena, CudaArena):
            socket = f"{self._run_dir}/kv-memory-{self.engine}-{self.device}"
            memory, self._descriptors = share_arena(arena, socket)
        else:
            memory = share_cuda(self.lane1.kv_bytes()) if arena is None else arena.address
        self.peers.share(self.engine, self.device, memory, self.kv_views)

    def warm(self) -> None:
        """Run each lane once, its members together, and open the weights that they share. All
        members have stored these by now.
        """
        if self._weight_file is not None:
            self._weight_file.open()
        for lane in self.groups.values():
            self._say(f"warming up the group of {lane.size}, its members together")
            lane.warm()

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Measure the steps of each lane: see `worker/calibration.py`. Raises LaneError."""
        self._say("measuring the steps of each lane")
        together = partial(self.communicators.any_of, self.widest)
        limits = StepLimits.of(self.lane1.config, self.blocks, self.lane1.groups)
        alone = self.lane1.pool if limits.pools else self.lane1.step
        self.calibration += calibrate(1, limits, alone, together)
        for size, lane in self.groups.items():
            limits = StepLimits.of(lane.runner.config, self.blocks, lane.runner.groups)
            for parallelism in lane.ways:
                step = partial(lane.execute, parallelism=parallelism)
                self.calibration += calibrate(size, limits, step, together, parallelism)

    def seed(self) -> None:
        """Let each lane draw its own random numbers. Called at the end of a start, in which lanes
        have drawn some.
        """
        for size, members in self.communicators.members.items():
            runner = self.lane1 if size == 1 else self.groups[size].runner
            runner.seed(aligned_group(self.engine, size), members)

    def begin_anew(self, size: int, times: int) -> None:
        """Let the lane for groups of `size` draw other random numbers than since its start, or than
        after fewer `times`.
        """
        group = aligned_group(self.engine, size)
        self.groups[size].runner.seed(group, [*self.communicators.members[size], times])

    def get_blocks(self) -> int:
        """Return the number of KV blocks that peers can read: see `blocks`."""
        return self.blocks

    def scheduler_config(self, size: int) -> tuple[VllmConfig, KVCacheConfig]:
        """Return `WorkerLane.scheduler_config` of the lane for groups of `size`."""
        return self.groups[size].scheduler_config()

    @torch.inference_mode()
    def execute(
        self,
        size: int,
        plan: Any,
        grammar: Any,
        use: OutputUse,
        parallelism: Parallelism = Parallelism.TENSOR,
    ) -> Any:
        """Run one step in the group of `size` engines; every member calls it with the same plan
        (its own block ids) and `parallelism`.

        Returns as `WorkerLane.execute`, or a VoidStep if a member is lost before the step is done.
        Raises CollectiveTimeout if a member lives but does not take part.
        """
        lane = self.groups[size]
        return _unless_broken(lambda: lane.execute(plan, grammar, use, parallelism))

    @torch.inference_mode()
    def take_output(self, size: int) -> Any:
        """Return the output of the oldest step of the group of `size` engines that was kept here,
        once it is there.

        Returns a VoidStep, or raises CollectiveTimeout, as `execute`.
        """
        return _unless_broken(self.groups[size].take_output)

    def drop_requests(self, size: int) -> None:
        """Forget the requests of the group of `size` engines, which has lost a member."""
        self.communicators.leave(size)
        self.groups[size].drop_requests()

    def rejoin(self, size: int, members: list[int]) -> None:
        """Reopen the group of `size` engines, which is whole again. `members`: as of
        `CommunicatorPool`.
        """
        self.communicators.reopen(size, members)
        self.groups[size].runner.seed(aligned_group(self.engine, size), members)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Keep the limit of all lanes equal to lane 1's when vLLM fits it to the KV memory."""
        for lane in self.groups.values():
            lane.runner.update_max_model_len(max_model_len)
