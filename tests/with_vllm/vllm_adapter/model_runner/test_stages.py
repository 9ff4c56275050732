"""Stages are what every rank has whole; what is partial, or depends on a router, is none."""

from typing import TypeVar

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.vllm_adapter.model_runner.stages import stages

M = TypeVar("M", bound=nn.Module)


def bare(cls: type[M], **attributes: object) -> M:
    """A module of this class that was not built."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update(attributes)
    return module


def row(summed: bool) -> RowParallelLinear:
    return bare(RowParallelLinear, reduce_results=summed)


def layer(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def test_products_are_stages_where_they_are_summed() -> None:
    model = layer(
        embed=bare(VocabParallelEmbedding),
        layers=nn.ModuleList([layer(o=row(True), shared=row(False), norm=nn.LayerNorm(4))]),
        project=row(True),
        head=bare(ParallelLMHead),
    )
    assert {name: stage.kind for name, stage in stages(model).items()} == {
        "embed": "embedding",
        "layers.0": "layer",
        "layers.0.o": "product",
        "project": "product",
    }


def test_a_layer_with_experts_is_routed_and_its_experts_are_left_out() -> None:
    listed = nn.ModuleList([layer(down=row(True))])
    model = layer(
        layers=nn.ModuleList(
            [layer(o=row(True), experts=listed), layer(experts=bare(RoutedExperts))]
        )
    )
    assert {name: stage.kind for name, stage in stages(model).items()} == {
        "layers.0": "routed",
        "layers.0.o": "product",
        "layers.1": "routed",
    }


def test_each_list_of_layers_counts() -> None:
    model = layer(
        low=nn.ModuleList([nn.Identity()]), high=layer(layers=nn.ModuleList([nn.Identity()]))
    )
    assert {name: stage.kind for name, stage in stages(model).items()} == {
        "low.0": "layer",
        "high.layers.0": "layer",
    }


def test_a_list_of_gates_by_head_is_no_list_of_layers() -> None:
    gate = layer(gate_proj=bare(ColumnParallelLinear, gather_output=False))
    gathered = layer(gate_proj=bare(ColumnParallelLinear, gather_output=True))
    block = layer(up=bare(ColumnParallelLinear, gather_output=False), down=row(True))
    model = layer(gates=nn.ModuleList([gate, gathered]), layers=nn.ModuleList([block]))
    assert {name: stage.kind for name, stage in stages(model).items()} == {
        "gates.1": "layer",
        "layers.0": "layer",
        "layers.0.down": "product",
    }
