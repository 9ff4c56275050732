"""The lanes of an engine over weights that may be dropped, and what their layers compute."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.errors import IntegrityError
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_matrix, keep_weights, pack_matrix
from flying_serving.weights.lending.arena_placement import ArenaPlacement
from flying_serving.weights.lending.residency import (
    WorkerWeights,
    in_order,
)
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.share import SharedWeights
from flying_serving.weights.units import Pack
from tests.unit.memory.layers import device_pages
from tests.with_vllm.weights.lending.recorded import Change, Recorded, until_none_changes
from tests.with_vllm.worker.loaded import load, nested, random, tree

WIDEST = 4
WAYS: dict[str, Pack | None] = {"packed": pack_matrix, "unpacked": keep_matrix, "placed": None}
"""How weights lie: *placed* ones in an arena of a device."""


class DroppableLanes:
    """The lanes of one engine of four over the weights of a model, and which of these it has.

    Weights that are not packed lie in an arena whose extents are single pages.
    """

    def __init__(
        self, config: VllmConfig, engine: int, pack: Pack | None, file: WeightFile
    ) -> None:
        lane1 = tree(config, 1)
        load(lane1)
        self.lanes = {1: lane1} | {size: tree(config, size) for size in (2, WIDEST)}
        self.file = file
        widest = lane_config(config, WIDEST, config.cache_config.block_size)
        with keep_weights(), set_current_vllm_config(widest):
            if pack is not None:
                self.weights = SharedWeights(lane1, WIDEST, pack, file)
            else:
                placement = ArenaPlacement(device_pages(16 << 20, file)[1], engine, WIDEST)
                self.weights = SharedWeights(lane1, WIDEST, None, placement=placement)
            self.weights.complete(self.lanes[WIDEST])
            for size in (2, WIDEST):
                self.weights.bind(self.lanes[size], engine % size, size)
        file.announce()
        file.open()
        self.changes: list[Change] = []
        pieces = in_order(lane1, self.weights.units)
        recorded = [(name, Recorded(name, units, self.changes)) for name, units in pieces]
        self.residency = WorkerWeights(recorded, engine)

    def results(self, size: int) -> dict[str, torch.Tensor | None]:
        """What each layer of a lane computes, by its name; None: it refused."""
        return {name: _tried(product) for name, product in products(self.lanes[size])}

    def drop_all(self, degree: int) -> list[Change]:
        return until_none_changes(lambda: self.residency.drop_next(degree), self.changes)

    def fetch_all(self) -> list[Change]:
        return until_none_changes(self.residency.fetch_next, self.changes)


def _tried(product: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    try:
        return product()
    except IntegrityError:
        return None


def products(model: Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield what multiplies with weights in a lane, by the name of its layer."""
    for name, layer in model.named_modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            width = (
                layer.input_size
                if isinstance(layer, ColumnParallelLinear)
                else layer.input_size_per_partition
            )
            yield name, _applied(layer, random(3, width))
        elif isinstance(layer, RoutedExperts):
            routing = {
                "topk_weights": torch.full((3, 2), 0.5),
                "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32),
            }
            shared = {"shared_experts": None, "shared_experts_input": None}
            yield name, _applied(layer, random(3, 64), **routing, **shared)
        elif isinstance(layer, VocabParallelEmbedding):
            if layer.quant_method._logits is not None:
                yield f"{name}: logits", _applied(layer, random(3, layer.embedding_dim))
            if not isinstance(layer, ParallelLMHead):
                yield name, _looked_up(layer, torch.arange(layer.weight.shape[0]))


def _applied(layer: Any, x: torch.Tensor, **others: Any) -> Callable[[], torch.Tensor]:
    return lambda: layer.quant_method.apply(layer, x, **others)


def _looked_up(layer: Any, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: layer.quant_method.embedding(layer, tokens)


def same(mine: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> bool:
    """Whether two lanes, or one at two times, have computed the same bits in each layer."""
    pairs = [(mine[name], theirs[name]) for name in mine.keys() | theirs.keys()]
    return all(
        left is not None and right is not None and torch.equal(left, right) for left, right in pairs
    )


def layer(**parts: Module) -> Module:
    """A model with a linear layer outside its list of layers, and one entry in that."""
    return nested(head=nn.Linear(1, 1), layers=nn.ModuleList([nested(**parts)]))
