"""A lane's wrappers read, of lane 1's adapters, what vLLM would load at the rank of that degree."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.model_manager import create_lora_manager

from flying_serving.errors import Unsupported
from flying_serving.vllm_adapter.lora.layers import LaneAdapters
from flying_serving.vllm_adapter.weights import trees
from flying_serving.weights.share import SharedWeights
from tests.unit.memory.layers import numbers
from tests.with_vllm.worker.configurations import LLAMA, configuration, small
from tests.with_vllm.worker.loaded import CPU, alone, load, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

RANK = 8
SLOT = 1
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-two-kv-heads": LLAMA | {"num_key_value_heads": 2},
    "qwen3": small("Qwen3", "qwen3", intermediate_size=128, head_dim=8),
}


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmConfig]:
    with alone(configuration(tmp_path, MODELS[request.param])) as made:
        made.lora_config = lora_config()
        yield made


def lora_config() -> LoRAConfig:
    return LoRAConfig(max_lora_rank=RANK, max_loras=2, lora_dtype=torch.float32)


def wrap(model: Module, config: VllmConfig) -> Module:
    """Wrap the layers as vLLM does at a start. Returns the model."""
    with set_current_vllm_config(config):
        assert config.lora_config is not None
        create_lora_manager(model, 4, 16, 515, config.lora_config, config, CPU)
    return model


def lane1(config: VllmConfig) -> Module:
    model = tree(config, 1)
    load(model)
    return wrap(model, config)


def wrappers(model: Module) -> dict[str, Any]:
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)
    }


def adapter_of(layer: Any) -> tuple[Any, Any]:
    """A and B of a layer of lane 1, or of each that is fused in it."""
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(a, torch.Tensor):
        shape = a.shape if isinstance(layer, LogitsProcessorWithLoRA) else (RANK, *a.shape[1:2])
        return numbers(1, *shape[-2:]), numbers(2, *b.shape[-2:])
    pairs = [
        (numbers(i, *x.shape[-2:]), numbers(9 + i, *y.shape[-2:]))
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    return pairs[0] if len(pairs) == 1 else tuple(map(list, zip(*pairs, strict=True)))


def stacked(layer: Any) -> list[torch.Tensor]:
    parts = [layer.lora_a_stacked, layer.lora_b_stacked]
    return [t for part in parts for t in ([part] if isinstance(part, torch.Tensor) else part)]


@pytest.mark.parametrize(("degree", "rank"), [(2, 1), (4, 0), (4, 3)])
def test_a_lane_sees_what_vllm_loads_at_its_rank(
    config: VllmConfig, degree: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lane1(config)
    weights = SharedWeights(model, 4, None)
    monkeypatch.setattr(trees._FirstOf, "rank_in_group", rank, raising=False)
    lane = wrap(tree(config, degree), config)
    weights.complete(lane)
    weights.bind(lane, rank, degree)

    for name, layer in wrappers(model).items():
        mine = wrappers(lane)[name]
        layer.set_lora(SLOT, *adapter_of(layer))
        seen = [tensor.clone() for tensor in stacked(mine)]
        for key in ("lora_a_stacked", "lora_b_stacked"):
            own = getattr(mine, key)
            alike = (
                torch.zeros(own.shape)
                if isinstance(own, torch.Tensor)
                else tuple(torch.zeros(part.shape) for part in own)
            )
            setattr(mine, key, alike)
        mine.set_lora(SLOT, *adapter_of(layer))
        for ours, theirs in zip(seen, stacked(mine), strict=True):
            assert torch.equal(ours, theirs), name


def test_ranks_share_the_memory_of_lane_1(config: VllmConfig) -> None:
    model = lane1(config)
    weights = SharedWeights(model, 4, None)
    lane = wrap(tree(config, 4), config)
    weights.complete(lane)
    weights.bind(lane, 3, 4)
    for name, layer in wrappers(lane).items():
        theirs = {part.untyped_storage().data_ptr() for part in stacked(wrappers(model)[name])}
        assert {part.untyped_storage().data_ptr() for part in stacked(layer)} == theirs


def test_a_layer_that_the_checkpoint_fuses_is_refused(tmp_path: Path) -> None:
    """vLLM cuts B of such a layer in several places."""
    phi = small("Phi3", "phi3", intermediate_size=128, pad_token_id=0)
    with alone(configuration(tmp_path, phi)) as config:
        config.lora_config = lora_config()
        model = lane1(config)
        weights = SharedWeights(model, 2, None)
        with pytest.raises(Unsupported, match=r"qkv_proj .* --lora-target-modules"):
            weights.bind(wrap(tree(config, 2), config), 0, 2)


class _Manager:
    """Lane 1's manager: notes what it is asked."""

    def __init__(self) -> None:
        self._adapter_manager = SimpleNamespace(lora_index_to_id=[7, None])
        self.asked: list[Any] = []

    def load(self, requests: set[Any]) -> frozenset[int]:
        self.asked.append(requests)
        return frozenset()

    def list_adapters(self) -> set[int]:
        return {7}


def test_a_lane_asks_lane_1_for_adapters_and_has_places_of_its_own() -> None:
    mapped: list[Any] = []
    lane1 = _Manager()
    layers: Any = SimpleNamespace(lora_index_to_id=[None, None])
    layers.set_adapter_mapping = lambda mapping: mapped.append((mapping, layers.lora_index_to_id))
    manager: Any = LaneAdapters(lane1, layers)  # type: ignore[arg-type]
    manager.set_active_adapters({"an adapter"}, "a mapping")
    assert lane1.asked == [{"an adapter"}]
    assert mapped == [("a mapping", [7, None])]
    assert manager.list_adapters() == {7}
