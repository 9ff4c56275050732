"""The lanes of a device of an engine, built over lane 1's weights and KV memory."""

from functools import partial

from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.config import Deployment
from flying_serving.layout.groups import aligned_group
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.log import logger
from flying_serving.memory.arena import Address, Arena
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.memory.cuda_ipc import share_cuda
from flying_serving.memory.kv_view import KVView
from flying_serving.memory.peers import PeerKV
from flying_serving.memory.shared_arena import SharedArena, share_arena
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads
from flying_serving.vllm_adapter.kv.views import alike_layers, views_of_lanes
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.token_parallel import TokenParallel, obstacle
from flying_serving.weights.layouts import hide_compiled_products, shared_weights
from flying_serving.weights.lending.lent_memory import LentMemory
from flying_serving.wire import CalibrationRow


def log_progress(engine: int, device: int, what: str) -> None:
    """Log that an engine begins a phase of its start. The first device logs for all."""
    if device == 0:
        logger.info("engine %d: %s", engine, what)


def _tensor_only(deployment: Deployment) -> str | None:
    """Return why no step of the server is to be token parallel; None if steps may be."""
    if not deployment.flying.token_parallel:
        return "--no-token-parallel"
    return "--lend-weights" if deployment.lends else None


class DeviceLanes(dict[int, DeviceLane]):
    """The lanes of one device of an engine by group size, lane 1 first, and all that they share.

    `lane1`: its model is loaded and not yet packed. `pack_weights`: as `LaneWorker.pack_weights`.
    `cuda`: the device whose memory weights and KV exchange; None: they are in memory of the host,
    or none may be lent.

    `lent`: the memory that weights and KV exchange. `blocks`: KV blocks that have memory while all
    weights are there, and that peers may read. `kv_views`, `kv_groups`, `peers`: see
    `migration/transfer.py`.
    """

    def __init__(
        self,
        lane1: DeviceLane,
        deployment: Deployment,
        device: int,
        *,
        pack_weights: bool,
        cuda: CudaDevice | None = None,
    ) -> None:
        super().__init__({1: lane1})
        self.engine, self.engines = lane1.group[0], deployment.engines
        self.device, self.devices = device, deployment.devices
        self.communicators = lane1.communicators
        self.weight_bytes = sum(weight.nbytes for weight in lane1.model.parameters())
        self._say = partial(log_progress, self.engine, device)
        self._say(f"sharing the weights with groups of {list(deployment.wider_sizes)} engines")
        for size in deployment.wider_sizes:
            self[size] = self._build(size, deployment)
        self.lent = LentMemory(deployment, self.engine, device)
        self.input_rounding = self._share_weights(pack_weights, cuda)
        self.blocks = 0
        self.kv_views: dict[int, list[KVView]] = {}
        self.kv_groups = lane1.kv.groups
        self.peers = PeerKV(deployment.run_dir, cuda, lane1.device)
        self.calibration: list[CalibrationRow] = []

    @property
    def wider(self) -> list[DeviceLane]:
        """The lanes for groups of several engines."""
        return [lane for lane in self.values() if lane.size > 1]

    def _build(self, size: int, deployment: Deployment) -> DeviceLane:
        """Build a lane that has no weights yet."""
        lane1, tokens = self[1], self._block_tokens(size)
        config = lane_config(lane1.config, size, tokens, captures=deployment.captures_groups)
        lane = DeviceLane.build(config, aligned_group(self.engine, size), lane1)
        group = self.communicators.same_device(size)
        why = _tensor_only(deployment) or obstacle(lane1, lane, size)
        lane.divides_tokens = why or TokenParallel(lane, lane1, group).used
        return lane

    def _block_tokens(self, size: int) -> int:
        """Return the tokens of a block in the lane for groups of `size`, from lane 1's present
        size.
        """
        config = self[1].config
        heads = fewest_kv_heads(config.model_config)
        return lane_block_tokens(config.cache_config.block_size, size, self.devices, heads)

    def _share_weights(self, pack: bool, cuda: CudaDevice | None) -> float:
        """Share lane 1's weights with all lanes. Returns their `input_rounding`."""
        lane1, widest = self[1], self[max(self)]
        weights = shared_weights(lane1, self.engine, widest.size, pack, self.lent.file, cuda)
        with set_current_vllm_config(widest.config):
            weights.complete(widest.model)
        for lane in self.wider:
            weights.bind(lane.model, lane.group.index(self.engine), lane.size)
        hide_compiled_products(lane1, pack)
        self.lent.take(lane1.model, weights.units)
        return weights.input_rounding

    def bind_kv(
        self, lane1_kv: KVCacheConfig, arena: Arena | CudaArena | None, own_bytes: int
    ) -> None:
        """Let all lanes read the KV bytes that lane 1 has allocated, in `arena` if there is one.
        Those beyond `own_bytes` have memory while weights are lent. Raises ConfigError as
        `LaneKV.bind`.
        """
        lane1 = self[1]
        lane1.kv.take(lane1_kv)
        for lane in self.wider:
            with lane.active():
                lane.kv.bind(lane1.kv.memory(), lane1_kv, self._block_tokens(lane.size))
        self.blocks = self.lent.take_kv(lane1_kv, arena, own_bytes, self)
        self.kv_groups = lane1.kv.groups
        kinds = alike_layers(lane1_kv, self.devices, lane1.config.model_config)
        self.kv_views = views_of_lanes(self, lane1_kv, kinds)

    def announce_kv(self, run_dir: str, arena: Arena | CudaArena | None) -> None:
        """Let peers read the KV memory of all lanes: that of `arena`, or the device's own.

        Peers of a CUDA device do not map extra blocks: the driver frees a page only when no process
        maps it.
        """
        if not self.kv_views:
            return
        memory: Address | SharedArena | bytes
        if isinstance(arena, CudaArena):
            socket = f"{run_dir}/kv-memory-{self.engine}-{self.device}"
            memory, self._descriptors = share_arena(arena, socket)
        else:
            memory = share_cuda(self[1].kv.memory()) if arena is None else arena.address
        self.peers.share(self.engine, self.device, memory, self.kv_views)

    def warm(self) -> None:
        """Run each lane once, its members together, and open the weights that they share. All
        members have stored these by now.
        """
        self.lent.open()
        for lane in self.wider:
            self._say(f"warming up the group of {lane.size}, its members together")
            lane.warm()
            lane.any_of(False)

    def seed(self) -> None:
        """Let each lane draw its own random numbers. Called at the end of a start, in which lanes
        have drawn some.
        """
        for size, members in self.communicators.members.items():
            self[size].seed(members)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Keep the limit of all lanes equal to lane 1's when vLLM fits it to the KV memory."""
        for lane in self.wider:
            lane.update_max_model_len(max_model_len)
