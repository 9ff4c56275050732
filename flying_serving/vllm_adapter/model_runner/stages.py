"""The parts of a vLLM model with outputs that are whole on every rank of a group, so that lanes can
be compared.
"""

from dataclasses import dataclass
from typing import Literal

from torch.nn import Module, ModuleList
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from flying_serving.vllm_adapter.lora.layers import base_of

Kind = Literal["embedding", "layer", "routed", "product", "logits"]
"""A `routed` layer has experts and a router; a `product` is a row-parallel layer that sums over the
ranks itself.
"""
LAYERS: tuple[Kind, ...] = ("layer", "routed")


@dataclass(frozen=True)
class ComparedModule:
    """One module with an output that lanes can be compared by."""

    kind: Kind
    module: Module


def stages(model: Module) -> dict[str, ComparedModule]:
    """Return the stages of a model by their names in it: embeddings, logits, layers, and each
    summed product.

    Other outputs within a layer may be partial. Modules of a list within a layer are left out:
    experts, whose tokens depend on a router.
    """
    found: dict[str, ComparedModule] = {}
    lists: list[str] = []
    nested: tuple[str, ...] = ()
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in lists))
        if name.startswith(nested):
            continue
        if isinstance(module, ModuleList):
            if inside:
                nested += (f"{name}.",)
            else:
                lists.append(name)
        elif kind := _kind(module, name.rpartition(".")[0] in lists):
            found[name] = ComparedModule(kind, module)
            if base_of(module) is not module:  # vLLM's wrapper calls parts of it
                nested += (f"{name}.",)
    return found


def _kind(module: Module, in_list: bool) -> Kind | None:
    """Return the kind of stage that a module is, if it is one. `in_list`: it is an entry of a list
    of layers.
    """
    if in_list:
        return _kind_of_layer(list(module.modules()))
    module = base_of(module)
    if isinstance(module, RowParallelLinear):
        return "product" if module.reduce_results else None
    if isinstance(module, LogitsProcessor):
        return "logits"
    head = isinstance(module, ParallelLMHead)
    return "embedding" if isinstance(module, VocabParallelEmbedding) and not head else None


def _kind_of_layer(parts: list[Module]) -> Kind | None:
    """Return the kind of an entry of a list of layers with these modules. None if it cuts columns
    and sums nothing: its output is of the rank's heads alone.
    """
    if any(isinstance(part, RoutedExperts | ModuleList) for part in parts):
        return "routed"
    cut = any(isinstance(part, ColumnParallelLinear) and not part.gather_output for part in parts)
    summed = any(isinstance(part, RowParallelLinear) for part in parts)
    return None if cut and not summed else "layer"
