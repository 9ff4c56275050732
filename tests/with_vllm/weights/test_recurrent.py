"""Layers with recurrent state: a rank's part is what vLLM's own loader gives it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module, Parameter
from torch.nn.functional import linear
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader

from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.weights.share import SharedWeights
from tests.unit.memory.layers import numbers
from tests.with_vllm.weights.falcon_h1 import HEADS, HIDDEN, INNER, STATE, falcon_h1
from tests.with_vllm.worker.configurations import configuration
from tests.with_vllm.worker.loaded import alone, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

WIDEST = 4
MIXER = "model.layers.0.mamba.mamba"
Spec = list[tuple[int, int, bool]]


def load_all(model: Module) -> None:
    """Give each parameter numbers. A convolution's has a view, so it cannot be swapped."""
    for seed, module in enumerate(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = numbers(seed, *parameter.shape)
            setattr(module, name, Parameter(data, requires_grad=False))


def parts(groups: int, size: int) -> Spec:
    """How vLLM cuts x, B and C for ranks of a group of this size."""
    more = 0 if groups % size == 0 else size - groups
    of_groups = ((groups + more) * STATE, more * STATE, more > 0)
    return [(INNER, 0, False), of_groups, of_groups]


def part_of(weight: torch.Tensor, spec: Spec, rank: int, size: int) -> torch.Tensor:
    rows = sum(full // size for full, _, _ in spec)
    part = torch.zeros(rows, *weight.shape[1:])
    mamba_v2_sharded_weight_loader(spec, size, rank)(part, weight)
    return part


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rank", range(WIDEST))
def test_a_rank_has_the_rows_of_its_heads_and_of_their_groups(
    groups: int, rank: int, tmp_path: Path
) -> None:
    config = configuration(tmp_path, falcon_h1(groups))
    with alone(config):
        lane1, lane = tree(config, 1), tree(config, WIDEST)
        load_all(lane1)
        mixer: Any = lane1.get_submodule(MIXER)
        projected = mixer.in_proj.weight.data.clone()
        with (
            keep_weights(),
            set_current_vllm_config(lane_config(config, WIDEST, config.cache_config.block_size)),
        ):
            weights = SharedWeights(lane1, WIDEST, None)
            weights.complete(lane)
            weights.bind(lane, rank, WIDEST)

        own: Any = lane.get_submodule(MIXER)
        spec = parts(groups, WIDEST)
        channels = part_of(mixer.conv1d.weight.data, spec, rank, WIDEST)
        assert torch.equal(own.conv1d.weight, channels)
        assert torch.equal(own.conv_weights, channels.squeeze(1))
        assert torch.equal(own.conv1d.bias, part_of(mixer.conv1d.bias.data, spec, rank, WIDEST))

        of_proj = [(INNER, 0, False), *spec, (HEADS, 0, False)]
        x = numbers(2, 3, HIDDEN)
        expected = linear(x, part_of(projected, of_proj, rank, WIDEST))
        assert torch.equal(own.in_proj(x)[0], expected)

        heads = slice(rank * HEADS // WIDEST, (rank + 1) * HEADS // WIDEST)
        assert torch.equal(own.A, mixer.A[heads])
        assert own.D.untyped_storage().data_ptr() == mixer.D.untyped_storage().data_ptr()
