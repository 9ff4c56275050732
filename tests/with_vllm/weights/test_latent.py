"""Latent attention in lanes: each has its heads of the matrices that vLLM takes from a
projection.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.weights.latent import ABSORBED, refuse_latent
from flying_serving.weights.share import SharedWeights
from tests.with_vllm.worker.configurations import DEEPSEEK_V3, configuration
from tests.with_vllm.worker.loaded import alone, load, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

RANK, DEGREE = 1, 2


@pytest.fixture
def config(tmp_path: Path) -> Iterator[VllmConfig]:
    with alone(configuration(tmp_path, DEEPSEEK_V3)) as config:
        yield config


def attention_of(model: Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, MLAAttention)]


def test_a_lane_has_views_of_the_heads_of_its_rank(config: VllmConfig) -> None:
    lane1, lane = tree(config, 1), tree(config, DEGREE)
    load(lane1)
    for attention in attention_of(lane1):
        attention.process_weights_after_loading(torch.float32)
    wider = lane_config(config, DEGREE, config.cache_config.block_size)
    with keep_weights(), set_current_vllm_config(wider):
        weights = SharedWeights(lane1, DEGREE, None)
        weights.complete(lane)
        weights.bind(lane, RANK, DEGREE)
    for whole, part in zip(attention_of(lane1), attention_of(lane), strict=True):
        for key in ABSORBED:
            all_heads, heads = getattr(whole, key), getattr(part, key)
            assert torch.equal(heads, all_heads[len(all_heads) // 2 :])
            assert heads.untyped_storage().data_ptr() == all_heads.untyped_storage().data_ptr()
        x = torch.randn(3, whole.kv_lora_rank)
        rows = whole.kv_b_proj(x)[0].chunk(DEGREE, dim=-1)[RANK]
        torch.testing.assert_close(part.kv_b_proj(x)[0], rows)


def layer_of(**changes: Any) -> Any:
    """An attention layer whose backend has a kernel for it."""
    backend = SimpleNamespace(get_name=lambda: "A_MLA", get_supported_head_sizes=lambda: [576])
    given = {"attn_backend": backend, "head_size": 576, "kv_b_proj": Module()}
    return SimpleNamespace(**given | {key: torch.zeros(1) for key in ABSORBED} | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"W_UV": None}, "attn: the attention backend A_MLA packs the projection of latents"),
        ({"head_size": 80}, r"attn: the attention backend A_MLA has no kernel for .* 80 numbers"),
    ],
    ids=["packed", "size"],
)
def test_latents_that_lanes_cannot_share_are_refused(changes: dict[str, Any], says: str) -> None:
    refuse_latent("attn", layer_of())
    with pytest.raises(WeightError, match=says):
        refuse_latent("attn", layer_of(**changes))
