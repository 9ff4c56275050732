"""All kinds of layers: the one table. A layer is of the first kind that matches."""

from torch.nn import Module

from flying_serving.weights.adapters import Adapter
from flying_serving.weights.experts import Experts
from flying_serving.weights.latent import LatentAttention, LatentProjection
from flying_serving.weights.linear import ColumnParallel, RowParallel
from flying_serving.weights.plain import Whole
from flying_serving.weights.quantized import Quantized, ScaledKV
from flying_serving.weights.recurrent import Convolution, Mamba, Multiplied, RecurrentColumn
from flying_serving.weights.rule import Layer, Rule, layers_of
from flying_serving.weights.vocabulary import Vocabulary

RULES: list[type[Rule]] = [
    Convolution,
    LatentProjection,
    Quantized,
    RecurrentColumn,
    ColumnParallel,
    RowParallel,
    Vocabulary,
    Experts,
    LatentAttention,
    ScaledKV,
    Mamba,
    Multiplied,
    Adapter,
    Whole,
]


def rule_of(layer: Layer) -> type[Rule]:
    """Return the kind of a layer of lane 1."""
    return next(rule for rule in RULES if rule.matches(layer))


def check_cuts(lane1: Module, engines: int) -> None:
    """Raise WeightError for the first layer of lane 1's model that cannot be cut for groups of
    `engines`.
    """
    for layer in layers_of(lane1):
        rule_of(layer).cut(layer, engines)


def end_loading(lane1: Module) -> None:
    """Turn the layers of a model without weights, which has data (`give_data`), into what vLLM
    makes of loaded ones. Raises WeightError as `Rule.end_loading`.
    """
    for layer in layers_of(lane1):
        rule_of(layer).end_loading(layer)
