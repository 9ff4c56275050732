"""Share lane 1's weights with lanes of other degrees, layer by layer."""

from typing import Any, cast

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.expert_kernels import takes_strides
from flying_serving.weights.adapters import bind_adapters
from flying_serving.weights.cuts import (
    column_bias,
    row_segment,
    vocabulary_segment,
)
from flying_serving.weights.expert_forms import expert_tensors, form_of, is_ready
from flying_serving.weights.experts import (
    ExpertsInUnits,
    SharedExperts,
    expert_units,
    install_experts,
)
from flying_serving.weights.formats import is_quantized
from flying_serving.weights.gated import gated_modules
from flying_serving.weights.latent import bind_latents, latent_projections, whole_columns
from flying_serving.weights.lending.arena_placement import Placement
from flying_serving.weights.lending.droppable import DroppableUnits
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.matrices import SharedMatrices, release
from flying_serving.weights.methods import LinearPart, VocabularyPart
from flying_serving.weights.plain import bind_whole, reachable, refuse_foreign
from flying_serving.weights.quantized import (
    QuantizedColumns,
    SharedQuantized,
    hold_scales,
    hold_tensors,
)
from flying_serving.weights.recurrent import OWN_BUFFERS, RecurrentLayers
from flying_serving.weights.storage import SharedLinear, StridedColumns, bias_part
from flying_serving.weights.units import Pack, RawUnits
from flying_serving.weights.whole_experts import WholeExperts

_BY_UNIT = (StridedColumns, QuantizedColumns)


class SharedWeights:
    """The weights of one worker, taken over from lane 1's model, which is loaded and not packed
    yet.

    `widest`: engines in the widest group, so the finest cut of this worker's shards. `pack`: how to
    pack a matrix on the CPU; None: keep matrices whole, rows of fused ones unit by unit, and hand
    out views. `file`: where weights are kept so that they may be dropped, which needs `pack`; None:
    no weight may. `placement`: where they lie if they may be dropped without `pack`. `units`: the
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
        file: WeightFile | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._widest = widest
        self._droppable = DroppableUnits(file, placement)
        self._matrices = SharedMatrices(pack, file, self._droppable)
        self.units = self._droppable.by_layer
        self._quantized = SharedQuantized(widest, lends=self._droppable.pages is not None)
        self._model = model
        self._full = dict(model.named_modules())
        self._linear: dict[str, SharedLinear] = {}
        self._logits: dict[int, SharedLinear] = {}
        self._segments: dict[str, tuple[Segment, ...]] = {}
        self._copies: list[torch.Tensor] = []
        self._vocabulary: dict[str, torch.Tensor] = {}
        self._tables: dict[int, RawUnits] = {}
        self._experts: dict[str, SharedExperts] = {}
        self._expert_rounding = 0.0
        self._kept_whole = latent_projections(model)
        self._droppable.place(model)
        self._recurrent = RecurrentLayers(model, widest)
        heads = _lm_head_weights(model)
        for name, layer in self._recurrent.take(model):
            self._take(name, layer, heads)
        self.bind(model, 0, 1)
        self._storages: set[int] = set()

    def _take(self, name: str, layer: Module, heads: set[int]) -> None:
        if is_quantized(layer):
            self._linear |= self._quantized.take(name, layer, self._segments)
        elif id(layer) in self._kept_whole:
            self._linear[name] = whole_columns(name, cast(Any, layer), self._widest)
        elif isinstance(layer, ColumnParallelLinear):
            self._segments[name] = self._recurrent.segments(name, layer)
            weight = layer.weight.data
            self._linear[name] = self._matrices.columns(
                name, weight, column_bias(layer), self._segments[name]
            )
            # rows in another order are for the products alone
            if self._matrices.has_order(weight):
                release(layer, "weight")
        elif isinstance(layer, RowParallelLinear):
            segment = row_segment(name, layer, self._widest)
            self._linear[name] = self._matrices.rows(name, layer, segment)
            if self._matrices.packs:
                release(layer, "weight")
        elif isinstance(layer, VocabParallelEmbedding):
            self._take_vocabulary(name, layer, heads)

    def _take_vocabulary(self, name: str, layer: VocabParallelEmbedding, heads: set[int]) -> None:
        segments, weight = (vocabulary_segment(name, layer, self._widest),), layer.weight.data
        if (address := weight.data_ptr()) in heads:
            # a tied head and its embedding are two modules with one weight
            if address not in self._logits:
                self._logits[address] = self._matrices.columns(name, weight, None, segments)
            self._linear[name] = self._logits[address]
        # only logits use an LM head of its own; a tied one is looked up in as well
        if isinstance(layer, ParallelLMHead) and weight.data_ptr() not in _embedding_weights(
            self._full
        ):
            if self._matrices.packs:
                release(layer, "weight")
        else:
            self._vocabulary[name] = weight
            if address not in self._tables:
                self._tables[address] = self._droppable.of_table(
                    name, weight, segments, self._logits.get(address)
                )

    def share_experts(self, skeleton: Module, lane1: Module) -> None:
        """Share lane 1's routed experts. A unit of those that are cut is shaped like a rank of
        `skeleton`, the widest lane's model. Without groups, those that vLLM has made ready stay as
        they are.

        Must be called once, before `bind`, with the skeleton still on the meta device.
        """
        shells = dict(skeleton.named_modules())
        for name, layer in lane1.named_modules():
            if isinstance(layer, RoutedExperts) and not (self._widest == 1 and is_ready(layer)):
                self._experts[name] = self._take_experts(name, layer, shells[name])
        cut = _storages(self._experts) - _storages(skeleton)
        self._storages = cut | _storages((lane1, self._linear, self._vocabulary))
        install_experts(lane1, self._experts, 0, 1)

    def _take_experts(self, name: str, layer: Any, shell: Module) -> SharedExperts:
        """Take a layer's experts: whole, if their kernel takes slices of them and none may be lent.

        A page may have rows of several units of an expert, so of whole ones hardly any page can be
        dropped.
        """
        form = form_of(name, layer)
        if form.method is None and self._droppable.pages is not None:
            raise WeightError(f"{name}: quantized experts cannot be lent (--lend-weights)")
        self._expert_rounding = max(self._expert_rounding, form.input_rounding)
        if self._droppable.pages is None and takes_strides(layer.quant_method):
            return WholeExperts(name, layer, self._widest)
        units = expert_units(name, layer, shell, self._widest)
        self._droppable.place_units([unit for _, unit in units])
        experts = ExpertsInUnits.of(units, self._droppable.pages)
        self._droppable.add(name, experts.raw)
        for key in expert_tensors(layer):
            release(layer, key)
        return experts

    @property
    def input_rounding(self) -> float:
        """The largest of a layer's `Format` or `ExpertForm`."""
        return max(self._quantized.input_rounding, self._expert_rounding)

    def bind(self, model: Module, rank: int, degree: int) -> None:
        """Give each layer of a lane's model, on the meta device, or of lane 1's own its part of the
        shared storage.

        Raises WeightError, naming a parameter that has no shared storage.
        """
        bind_latents(model, self._full, rank, degree)
        for name, layer in self._recurrent.bind(model, rank, degree):
            if isinstance(layer, LinearBase) and name in self._linear:
                self._bind_linear(name, layer, rank, degree)
            elif isinstance(layer, VocabParallelEmbedding):
                self._bind_vocabulary(name, layer, rank, degree)
            elif degree > 1:
                hold_scales(layer, self._full.get(name))
                cut = expert_tensors(layer) if isinstance(layer, RoutedExperts) else OWN_BUFFERS
                bind_whole(name, layer, self._full.get(name), rank, degree, but=cut)
        self._bind_gated(model, rank, degree)
        bind_adapters(model, self._full, rank, degree)
        if degree > 1:
            install_experts(model, self._experts, rank, degree)
            # a lane's products may have an index beside the weights
            refuse_foreign(
                model,
                self._model,
                self._storages | _storages((self._linear, self._recurrent)),
                rank,
                degree,
            )

    def _bind_linear(self, name: str, layer: Any, rank: int, degree: int) -> None:
        full = self._full[name]
        rank, degree = self._place(name, layer, rank, degree)
        layer.quant_method = LinearPart(self._linear[name].part(rank, degree))
        hold_tensors(layer, full)
        if layer.bias is not None:
            layer.bias = (
                self._bias_part(name, full, rank, degree) if _is_outside(layer) else full.bias
            )

    def _place(self, name: str, layer: Any, rank: int, degree: int) -> tuple[int, int]:
        """Return the rank and degree of a layer in a lane. A layer that vLLM does not cut is whole
        on every rank.
        """
        whole = layer.tp_size == self._full[name].tp_size
        return (0, 1) if whole and degree > 1 else (rank, degree)

    def _bind_gated(self, model: Module, rank: int, degree: int) -> None:
        """Let activations read fused products unit by unit, where the storage has them so."""
        if not any(isinstance(columns, _BY_UNIT) for columns in self._linear.values()):
            return
        for gated in gated_modules(model):
            columns = self._linear.get(gated.fused_name)
            if isinstance(columns, _BY_UNIT):
                place = self._place(gated.fused_name, gated.layer, rank, degree)
                units = len(self._segments[gated.fused_name][0].units_of(*place))
                if units > 1:
                    gated.layer.quant_method = LinearPart(columns.part_by_unit(*place))
                    gated.read_by_unit(units)

    def _bias_part(self, name: str, full: Any, rank: int, degree: int) -> Parameter:
        """Return a rank's part of a column-parallel layer's bias that the model adds itself,
        outside the product.
        """
        if degree == 1:
            return cast(Parameter, full.bias)
        part = bias_part(full.bias.data, self._segments[name], rank, degree)
        self._storages.add(part.untyped_storage().data_ptr())
        self._copies.append(part)  # an address of `_storages` must not be given to another tensor
        return Parameter(part, requires_grad=False)

    def _bind_vocabulary(
        self, name: str, layer: VocabParallelEmbedding, rank: int, degree: int
    ) -> None:
        linear, full = self._linear.get(name), self._vocabulary.get(name)
        check = _nothing if full is None else self._tables[full.data_ptr()].guard(rank, degree)
        layer.quant_method = VocabularyPart(
            None if linear is None else linear.part(rank, degree), check
        )
        if full is not None:
            rows = full.shape[0] // degree
            if layer.weight.shape[0] != rows:
                raise WeightError(
                    f"{name}.weight: {layer.weight.shape[0]} rows in a lane, {rows} of lane 1's"
                )
            layer.weight = Parameter(full[rank * rows : (rank + 1) * rows], requires_grad=False)
        else:
            layer.weight = self._full[name].weight
        _bind_vocabulary_bias(layer, self._full[name], rank, degree)
        if degree > 1:  # also the matrix that a model's own embedding multiplies with
            bind_whole(name, layer, self._full[name], rank, degree, but=("weight", "bias"))


def _is_outside(layer: LinearBase) -> bool:
    """Return whether the model itself adds a layer's bias."""
    return isinstance(layer, ColumnParallelLinear) and bool(layer.skip_bias_add)


def _bind_vocabulary_bias(
    layer: VocabParallelEmbedding, full: Module, rank: int, degree: int
) -> None:
    """Give a head of a lane its part of lane 1's bias. vLLM's Transformers backend makes it while
    it loads: a lane has none.
    """
    bias = getattr(full, "bias", None)
    if bias is not None and degree > 1:
        rows = bias.shape[0] // degree
        layer.bias = Parameter(bias.data[rank * rows : (rank + 1) * rows], requires_grad=False)


def _nothing() -> None:
    """Check nothing. An LM head of its own has no look-up, only a product, which checks itself."""


def _storages(root: Any) -> set[int]:
    """Return the addresses of the storages of all tensors that can be reached from an object."""
    return {tensor.untyped_storage().data_ptr() for _, tensor, _ in reachable(root)}


def _lm_head_weights(model: Module) -> set[int]:
    """Return the addresses of the weights that logits are computed with: untied heads, and
    embeddings tied to heads.
    """
    tied = model.lm_head if hasattr(model, "lm_head") else None
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    if isinstance(tied, VocabParallelEmbedding):
        heads.append(tied)
    if not heads:  # Gemma 2 and others: `compute_logits` multiplies with the embedding itself
        heads = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    return {layer.weight.data_ptr() for layer in heads if hasattr(layer, "weight")}


def _embedding_weights(modules: dict[str, Module]) -> set[int]:
    return {
        layer.weight.data_ptr()
        for layer in modules.values()
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    }
