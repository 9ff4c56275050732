"""A lane's configuration: lane 1's with another degree, and nothing of lane 1's model."""

import gc
import pickle
import types
from typing import Any

import pytest
import torch
from torch.nn import Linear
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from flying_lab.tiny_models.checkpoint import make_model
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from harness.live import ROOT

pytestmark = pytest.mark.usefixtures("classes_imported_here")

LAYER = "model.layers.0.self_attn.attn"
MOST_SENT = 1 << 16
"""Bytes; a model's own configuration is most of them."""


class Loaded(Linear):
    """A layer with weights, which must not be copied, not even for a moment: experts may be most of
    the memory.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("a loaded layer was copied")


OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def tensors_of(root: Any) -> list[torch.Tensor]:
    """Every tensor that can be reached from an object, but through classes, modules of Python and
    functions.
    """
    seen, left, found = set(), [root], []
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        left += gc.get_referents(value)
    return found


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    """vLLM's own, of a mixture of experts."""
    path = str(make_model(ROOT / ".models" / "mixtral", "mixtral"))
    return EngineArgs(model=path, enforce_eager=True, max_model_len=256).create_engine_config()


def test_lane_configuration_has_its_own_degree_and_block_size(config: VllmConfig) -> None:
    lane = lane_config(config, 4, 96)
    assert lane.parallel_config.tensor_parallel_size == 4
    assert lane.parallel_config.world_size == 4
    assert lane.cache_config.block_size == 96
    assert config.parallel_config.tensor_parallel_size == 1
    assert config.cache_config.block_size != 96


def test_lane_configuration_schedules_as_lane_1_does(config: VllmConfig) -> None:
    scheduler = config.scheduler_config
    before = scheduler.async_scheduling
    try:
        for is_async in (False, True):
            scheduler.async_scheduling = is_async
            assert lane_config(config, 2, 32).scheduler_config.async_scheduling is is_async
    finally:
        scheduler.async_scheduling = before


def test_lane_configuration_copies_no_loaded_layer(config: VllmConfig) -> None:
    """vLLM keeps experts and attention layers in the configuration, for its operators to find them
    by name.
    """
    layers = config.compilation_config.static_forward_context
    layers["model.layers.0.block_sparse_moe.experts"] = Loaded(3, 5)
    config.compilation_config.static_all_moe_layers.append(
        "model.layers.0.block_sparse_moe.experts"
    )
    try:
        assert len(tensors_of(config)) >= 2
        lane = lane_config(config, 2, 32)
        assert tensors_of(lane) == []
        assert lane.compilation_config.static_forward_context == {}
        assert lane.compilation_config.static_all_moe_layers == []
        assert list(layers) == config.compilation_config.static_all_moe_layers
    finally:
        layers.clear()
        config.compilation_config.static_all_moe_layers.clear()


def test_description_of_a_lane_has_no_weight_and_no_kv(config: VllmConfig) -> None:
    """With several devices it is pickled: there must be no weight in it and no KV memory."""
    lane = lane_config(config, 2, 32)
    layers = lane.compilation_config.static_forward_context
    layers[LAYER] = Loaded(3, 5)
    layers[LAYER].kv_cache = torch.zeros(1 << 20, dtype=torch.int8)
    lane.compilation_config.static_all_moe_layers.append(LAYER)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)]
    )
    communicators: Any = None
    on_device = DeviceLane(None, lane, (0, 1), communicators)
    on_device.kv.take(kv)
    sent = on_device.scheduler_config()
    assert tensors_of(sent) == []
    pickled = pickle.dumps(sent)
    assert len(pickled) < MOST_SENT
    got, got_kv = pickle.loads(pickled)
    assert got.compilation_config.static_forward_context == {}
    assert got.compilation_config.static_all_moe_layers == []
    for part in ("parallel_config", "cache_config", "scheduler_config"):
        assert getattr(got, part) == getattr(lane, part)
    assert got_kv == kv
    assert list(layers) == [LAYER], "the worker's own lane keeps its layers"
