"""The storage of a worker's weights for all lanes: packed, whole, or where they can be lent."""

import torch

from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.vllm_adapter.model_runner.compiled import is_compiled
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.weights import loading
from flying_serving.weights.lending.arena_placement import ArenaPlacement
from flying_serving.weights.lending.device_pages import ALIGNED_BYTES, STAGED_BYTES, DevicePages
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.methods import hide_products
from flying_serving.weights.share import SharedWeights


def shared_weights(
    lane1: DeviceLane,
    engine: int,
    widest: int,
    pack: bool,
    file: WeightFile | None,
    cuda: CudaDevice | None,
) -> SharedWeights:
    """Return lane 1's weights for lanes of up to `widest` engines.

    `pack`: whether matrices are packed in units (CPU). `file`: keeps weights that may be dropped;
    None: no weight may. `cuda`: the device whose memory they are in then, unless they are packed.
    """
    model = lane1.model
    if file is not None and not pack:
        assert cuda is not None
        placement = ArenaPlacement(_pages_of(lane1, file, cuda), engine % widest, widest)
        return SharedWeights(model, widest, None, placement=placement)
    packing = loading.packing(lane1.config.model_config.dtype) if pack else None
    if file is not None and packing is None:
        # in units too: a view of a whole weight cannot be dropped
        packing = loading.keep_matrix
    return SharedWeights(model, widest, packing, file)


def hide_compiled_products(lane1: DeviceLane, pack: bool) -> None:
    """Make each product with packed weights one operation for torch.compile, if lane 1 is
    compiled. `pack`: as for `shared_weights`, whose lanes are bound.
    """
    config = lane1.config
    is_packed = pack and loading.packing(config.model_config.dtype) is not None
    if is_packed and is_compiled(config):
        hide_products(lane1.model, config.compilation_config.static_forward_context)


def _pages_of(lane1: DeviceLane, file: WeightFile, cuda: CudaDevice) -> DevicePages:
    """Return the pages of an arena with addresses for all weights of a model.

    Kernels of routed experts may have a larger format, which gets as many addresses again.
    """
    weights = list(lane1.model.parameters())
    size_bytes = 2 * sum(weight.nbytes + ALIGNED_BYTES for weight in weights)
    pinned = any(weight.is_cuda for weight in weights)
    staging = torch.empty(STAGED_BYTES, dtype=torch.int8, device="cpu", pin_memory=pinned)
    return DevicePages(CudaArena(cuda, size_bytes), file, staging)
