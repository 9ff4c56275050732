"""What of a model's weights is packed, and how often."""

from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.weights.share import SharedWeights
from flying_serving.weights.units import Product
from tests.with_vllm.worker.configurations import LLAMA, configuration
from tests.with_vllm.worker.loaded import alone, load, nested, random

pytestmark = pytest.mark.usefixtures("classes_imported_here")


def test_a_tied_vocabulary_is_packed_once(tmp_path: Path) -> None:
    """An embedding and a head are two modules then. Both have the logits of the one weight."""
    packed: list[torch.Tensor] = []

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        packed.append(weight)
        return lambda x, out: torch.mm(x, weight.t(), out=out)

    with alone(configuration(tmp_path, LLAMA)):
        model = nested(embed=VocabParallelEmbedding(64, 8), lm_head=ParallelLMHead(64, 8))
        model.lm_head.tie_weights(model.embed)
        load(model)
        SharedWeights(model, 4, pack)
        x = random(3, 8)
        expected = x @ model.embed.weight.t()
        for layer in (model.embed, model.lm_head):
            torch.testing.assert_close(layer.quant_method.apply(layer, x), expected)
    assert sum(weight.numel() for weight in packed) == 64 * 8
