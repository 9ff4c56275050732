"""A kind of layer: the methods by which lanes share it. `kinds.py` lists all kinds."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.nn import Module

from flying_serving.layout.shards import Segment
from flying_serving.weights.store import Store


class Layer(NamedTuple):
    """A module of a model.

    Args:
        name: in the model.
        module: it.
        owners: the modules that have it as a part, by name.
        model: the whole model.
    """

    name: str
    module: Any
    owners: Mapping[str, Module]
    model: Module


def layers_of(model: Module) -> list[Layer]:
    """Return the modules of a model, each once."""
    named = dict(model.named_modules())
    owners: dict[int, dict[str, Module]] = defaultdict(dict)
    for name, module in named.items():
        for part in module.children():
            owners[id(part)][name] = module
    return [Layer(name, module, owners[id(module)], model) for name, module in named.items()]


class Rule:
    """A kind of layer; an object of it is one layer of lane 1, which is loaded.

    A layer is of the first kind of the table that matches. `take` is called for each layer of lane
    1 in the order of the model, then `bind` for lane 1 itself, `complete`, and `bind` for each
    lane.

    Args:
        layer: of lane 1. Its module is `full`.

    `of`: the class of such layers. `made`: holds the tensors that lanes have beside lane 1's. No
    lane may have others. `input_rounding`: see `Format`.
    """

    of: Any = ()
    input_rounding = 0.0

    def __init__(self, layer: Layer) -> None:
        self.layer, self.name, self.full = layer, layer.name, layer.module
        self.made: list[Any] = []

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        """Return whether a layer of lane 1 is of this kind."""
        return isinstance(layer.module, cls.of)

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        """Return the segments of a layer's weight for groups of up to `engines`; none if it is not
        cut. The layer may be without weights. Raises WeightError, naming it, if it does not divide.
        """
        return ()

    @classmethod
    def end_loading(cls, layer: Layer) -> None:
        """Turn a layer of one number, seen in each shape, into what vLLM makes of a loaded one.

        It is shared to see which group sizes a model admits. So what sharing copies must be small.
        """

    def take(self, store: Store) -> None:
        """Take the weight into the storage of all lanes. Raises WeightError if that cannot be."""

    def complete(self, shells: Mapping[str, Module], store: Store) -> None:
        """Take what needs the layers of the widest lane (`shells`, by name) on the meta device,
        and bind lane 1's again. Raises WeightError if that cannot be.
        """

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """Give the layer of this name in the lane of `rank` of `degree` its part. The lane is on
        the meta device, or lane 1 itself (`degree` 1). Raises WeightError if there is no such part.
        """
        raise NotImplementedError
