"""Embeddings and LM heads in lanes: a look-up in rows of the one table, and logits of these."""

from torch.nn import Module, Parameter
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.linear import cut
from flying_serving.weights.methods import VocabularyPart
from flying_serving.weights.plain import Whole
from flying_serving.weights.rule import Layer
from flying_serving.weights.storage import SharedLinear
from flying_serving.weights.store import Store, release
from flying_serving.weights.units import RawUnits


class Vocabulary(Whole):
    """An embedding, an LM head, or both: two modules with one weight, or one module."""

    of = VocabParallelEmbedding
    bound = ("weight", "bias")
    _logits: SharedLinear | None = None
    _table: RawUnits | None = None

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        """See `Rule`. Raises WeightError if it is quantized, too."""
        weight = getattr(layer.module, "weight", None)
        if weight is None or weight.element_size() == 1:
            raise WeightError(
                f"{layer.name}: quantized embeddings and LM heads cannot be shared by lanes"
            )
        return (cut(layer.name, weight.shape[0], "tokens of the vocabulary", engines),)

    def take(self, store: Store) -> None:
        segments, weight = self.cut(self.layer, store.widest), self.full.weight
        is_head = weight.data_ptr() in _lm_head_weights(self.layer.model)
        # only logits use an LM head of its own; a tied one is looked up in as well
        is_table = not isinstance(self.full, ParallelLMHead)
        is_table |= weight.data_ptr() in _embedding_weights(self.layer.model)
        if is_head:
            self._logits = store.logits(self.name, weight, segments)
        if is_table:
            self._table = store.table(self.name, weight, segments)
        elif store.packs:
            release(self.full, "weight")
        self.made += [self._logits, self._table]

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Rule`. Raises WeightError if a lane has another vocabulary."""
        module, full = layer.module, self.full
        logits = None if self._logits is None else self._logits.part(rank, degree)
        # an LM head of its own has no look-up, only a product, which checks itself
        check = (lambda: None) if self._table is None else self._table.guard(rank, degree)
        module.quant_method = VocabularyPart(logits, check)
        if self._table is None:
            module.weight = full.weight
        elif module.weight.shape[0] * degree != full.weight.shape[0]:
            raise WeightError(
                f"{self.name}.weight: {module.weight.shape[0]} rows in a lane, "
                f"{full.weight.shape[0] // degree} of lane 1's"
            )
        else:
            module.weight = _rows(full.weight, rank, degree)
        # vLLM's Transformers backend makes it while it loads: a lane has none
        if degree > 1 and getattr(full, "bias", None) is not None:
            module.bias = _rows(full.bias, rank, degree)
        # also the matrix that a model's own embedding multiplies with
        super().bind(layer, rank, degree)


def _rows(tensor: Parameter, rank: int, degree: int) -> Parameter:
    """Return a rank's part of a tensor of the vocabulary, as a view."""
    rows = tensor.shape[0] // degree
    return Parameter(tensor.data[rank * rows : (rank + 1) * rows], requires_grad=False)


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


def _embedding_weights(model: Module) -> set[int]:
    return {
        layer.weight.data_ptr()
        for layer in model.modules()
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    }
