"""Share lane 1's weights with lanes of other degrees, layer by layer."""

from torch.nn import Module

from flying_serving.weights.kinds import rule_of
from flying_serving.weights.lending.arena_placement import ArenaPlacement
from flying_serving.weights.plain import Whole, refuse_foreign, storages
from flying_serving.weights.rule import Rule, layers_of
from flying_serving.weights.store import Store
from flying_serving.weights.units import Pack, WeightPages


class SharedWeights:
    """The weights of one worker, taken over from lane 1's model, which is loaded and not packed
    yet.

    `widest`: engines in the widest group, so the finest cut of this worker's shards. `pack`: how to
    pack a matrix on the CPU; None: keep matrices whole, rows of fused ones unit by unit, and hand
    out views. `pages`: the memory of weights that may be dropped, which needs `pack`; None: no
    weight may. `placement`: where they lie if they may be dropped without `pack`. `units`: the
    units that may be dropped, by the name of their layer.

    After the constructor lane 1's own layers multiply with the shared storage too.

    Raises:
        WeightError: naming the first layer that cannot be shared.
    """

    def __init__(
        self,
        model: Module,
        widest: int,
        pack: Pack | None,
        pages: WeightPages | None = None,
        placement: ArenaPlacement | None = None,
    ) -> None:
        self._model = model
        self._store = Store(widest, pack, pages, placement)
        self.units = self._store.droppable.by_layer
        self._layers: dict[str, Rule] = {}
        for layer in layers_of(model):
            shared = self._layers[layer.name] = rule_of(layer)(layer)
            shared.take(self._store)
        self.bind(model, 0, 1)

    def complete(self, skeleton: Module) -> None:
        """Share what needs the widest lane's model, `skeleton`: routed experts. A unit of those
        that are cut is shaped like a rank of it.

        Must be called once, before `bind`, with the skeleton still on the meta device. Raises
        WeightError as the constructor.
        """
        shells = dict(skeleton.named_modules())
        for shared in self._layers.values():
            shared.complete(shells, self._store)

    @property
    def input_rounding(self) -> float:
        """The largest of a layer's `Format` or `ExpertForm`."""
        return max(shared.input_rounding for shared in self._layers.values())

    def bind(self, model: Module, rank: int, degree: int) -> None:
        """Give each layer of a lane's model, on the meta device, or of lane 1's own its part of the
        shared storage.

        Raises WeightError, naming a parameter that has no shared storage.
        """
        for layer in layers_of(model):
            # whatever a layer has that lane 1 lacks is refused by name
            shared = self._layers.get(layer.name) or Whole(layer._replace(module=Module()))
            shared.bind(layer, rank, degree)
        if degree > 1:
            shared_tensors = [self._model, *(shared.made for shared in self._layers.values())]
            refuse_foreign(model, self._model, storages(shared_tensors), rank, degree)
