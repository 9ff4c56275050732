"""The table of kinds of layers: which kind a layer is of, and a kind that is added to it."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.loading import parameters_on_meta
from flying_serving.vllm_adapter.weights.trees import give_data
from flying_serving.weights import kinds
from flying_serving.weights.experts import Experts
from flying_serving.weights.kinds import RULES, check_cuts, end_loading, rule_of
from flying_serving.weights.latent import LatentAttention, LatentProjection
from flying_serving.weights.linear import ColumnParallel, RowParallel, cut
from flying_serving.weights.plain import Whole
from flying_serving.weights.quantized import Quantized
from flying_serving.weights.recurrent import Convolution, Mamba, Multiplied, RecurrentColumn
from flying_serving.weights.rule import Layer, Rule, layers_of
from flying_serving.weights.share import SharedWeights
from flying_serving.weights.storage import rows_of
from flying_serving.weights.store import Store
from flying_serving.weights.vocabulary import Vocabulary
from tests.unit.memory.layers import numbers
from tests.with_vllm.weights.falcon_h1 import falcon_h1
from tests.with_vllm.worker.configurations import DEEPSEEK_V3, LLAMA, QWEN2_MOE, configuration
from tests.with_vllm.worker.loaded import alone, nested, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

WIDEST, HIDDEN, ROWS = 4, 8, 16


class Damped(nn.Module):
    """A made-up layer. Its last row, which every rank has, damps all outputs."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(rows + 1, HIDDEN), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = linear(x, self.weight)
        return out[..., :-1] * out[..., -1:]


class DampedRule(Rule):
    """All that lanes need to know of it."""

    of = Damped
    segments: tuple[Segment, ...]

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        return (cut(layer.name, layer.module.weight.shape[0] - 1, "rows", engines),)

    def take(self, store: Store) -> None:
        self.segments = self.cut(self.layer, store.widest)

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        (rows,) = rows_of(self.segments, rank, degree)
        if degree > 1:
            part = torch.cat([self.full.weight[rows], self.full.weight[-1:]])
            layer.module.weight = Parameter(part, requires_grad=False)
            self.made.append(part)


def model(degree: int) -> nn.Module:
    """A model of that layer and two that vLLM or torch has."""
    return nested(norm=nn.LayerNorm(HIDDEN), damped=Damped(ROWS // degree))


def loaded() -> nn.Module:
    lane1 = model(1)
    lane1.damped.weight.data.copy_(numbers(1, ROWS + 1, HIDDEN))
    return lane1


def lane(degree: int) -> Any:
    with parameters_on_meta():
        return model(degree)


def shared(lane1: nn.Module) -> SharedWeights:
    weights = SharedWeights(lane1, WIDEST, None)
    weights.complete(lane(WIDEST))
    return weights


@pytest.fixture
def with_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row more of the table."""
    monkeypatch.setattr(kinds, "RULES", [DampedRule, *RULES])


@pytest.mark.usefixtures("with_rule")
@pytest.mark.parametrize("degree", [1, 2, WIDEST])
def test_a_made_up_layer_is_shared_by_one_rule(degree: int) -> None:
    """Its ranks compute what the whole layer does, as numbers are whole."""
    lane1, x = loaded(), numbers(2, 3, HIDDEN)
    expected = lane1.damped(x)
    weights = shared(lane1)
    lanes = [lane(degree) for _ in range(degree)] if degree > 1 else [lane1]
    for rank, of_rank in enumerate(lanes):
        weights.bind(of_rank, rank, degree)
    assert torch.equal(torch.cat([each.damped(x) for each in lanes], dim=-1), expected)
    assert all(each.norm.weight.data_ptr() == lane1.norm.weight.data_ptr() for each in lanes)


@pytest.mark.usefixtures("with_rule")
def test_group_sizes_that_a_made_up_layer_has_not_are_refused() -> None:
    check_cuts(lane(1), WIDEST)
    with pytest.raises(WeightError, match=r"^damped: 16 rows do not divide by 32$"):
        check_cuts(lane(1), 32)


def test_a_layer_without_a_rule_is_refused_by_name() -> None:
    says = r"^damped\.weight: shape \(9, 8\) in a lane is no part of \(17, 8\) in lane 1$"
    with pytest.raises(WeightError, match=says):
        shared(loaded()).bind(lane(2), 0, 2)


def test_a_tensor_that_a_rule_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that gives a lane memory of its own has to say so."""

    class Silent(DampedRule):
        def bind(self, layer: Layer, rank: int, degree: int) -> None:
            super().bind(layer, rank, degree)
            self.made.clear()

    monkeypatch.setattr(kinds, "RULES", [Silent, *RULES])
    with pytest.raises(WeightError, match=r"^damped\.weight: has memory of its own"):
        shared(loaded()).bind(lane(2), 0, 2)


def test_a_layer_that_lane_1_lacks_is_refused_by_name() -> None:
    weights, of_lane = shared(nested(norm=nn.LayerNorm(HIDDEN))), lane(2)
    with pytest.raises(WeightError, match=r"^damped\.weight: lane 1 has no tensor of this name$"):
        weights.bind(of_lane, 0, 2)


def test_a_kind_comes_before_those_that_it_is_one_of() -> None:
    assert [
        (later, rule) for rule, later in combinations(RULES, 2) if issubclass(later, rule)
    ] == []
    assert RULES[-1] is Whole


EXPERTS = "model.layers.1.mlp.experts.routed_experts"
MIXER = "model.layers.0.mamba.mamba"
KINDS: tuple[tuple[dict[str, Any], dict[str, type[Rule]]], ...] = (
    (
        LLAMA,
        {
            "model.embed_tokens": Vocabulary,
            "model.layers.0.self_attn.qkv_proj": ColumnParallel,
            "model.layers.0.self_attn.o_proj": RowParallel,
            "model.layers.0.input_layernorm": Whole,
            "lm_head": Vocabulary,
        },
    ),
    (QWEN2_MOE, {EXPERTS: Experts, "model.layers.1.mlp.gate": Whole}),
    (
        DEEPSEEK_V3,
        {
            "model.layers.0.self_attn.kv_b_proj": LatentProjection,
            "model.layers.0.self_attn.q_b_proj": ColumnParallel,
            "model.layers.0.self_attn.mla_attn.mla_attn": LatentAttention,
        },
    ),
    (
        falcon_h1(4),
        {
            f"{MIXER}.conv1d": Convolution,
            f"{MIXER}.in_proj": RecurrentColumn,
            f"{MIXER}.out_proj": RowParallel,
            MIXER: Mamba,
            MIXER.rpartition(".")[0]: Multiplied,
        },
    ),
)


@pytest.mark.parametrize(
    ("model", "expected"), KINDS, ids=["llama", "qwen2-moe", "deepseek-v3", "falcon-h1"]
)
def test_layers_of_real_models_are_of_their_kinds(
    model: dict[str, Any], expected: dict[str, type[Rule]], tmp_path: Path
) -> None:
    with alone(configuration(tmp_path, model)) as config:
        found = {layer.name: rule_of(layer) for layer in layers_of(tree(config, 1))}
    assert {name: found[name] for name in expected} == expected


def test_a_layer_of_another_method_is_quantized(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, LLAMA)):
        layer = MergedColumnParallelLinear(8, [16, 16], bias=False)
    layer.quant_method = object()
    assert rule_of(Layer("up", layer, {}, nested(up=layer))) is Quantized


def test_owners_are_the_modules_that_a_layer_is_a_part_of() -> None:
    part = nn.Identity()
    found = layers_of(nested(a=nested(x=part), b=nested(y=part)))
    assert [layer.name for layer in found] == ["", "a", "a.x", "b"]
    assert list(found[2].owners) == ["a", "b"]
    assert found[0].owners == {}


def test_experts_without_weights_keep_one_with_one_input(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, QWEN2_MOE)) as config:
        lane1 = tree(config, 1)
    give_data(lane1)
    end_loading(lane1)
    experts: Any = lane1.get_submodule(EXPERTS)
    shapes: list[Sequence[int]] = [experts.w13_weight.shape, experts.w2_weight.shape]
    assert shapes == [(1, 128, 1), (1, 1, 64)]
