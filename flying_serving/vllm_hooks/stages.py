"""The parts of a vLLM model whose outputs every rank of a group has whole: embeddings, decoder layers, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.nn import Module, ModuleList
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


@dataclass(frozen=True)
class Stage:
    """One module whose output can be compared between lanes."""

    kind: Literal["embedding", "layer", "logits"]
    module: Module


def stages(model: Module) -> dict[str, Stage]:
    """The stages of a model by their names in it. What lies within a layer is not among them: it may be partial."""
    found: dict[str, Stage] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, ModuleList) and not inside:
            lists.append(name)
        elif inside and name.rpartition(".")[0] in lists:
            found[name] = Stage("layer", module)
        elif isinstance(module, LogitsProcessor):
            found[name] = Stage("logits", module)
        elif isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            found[name] = Stage("embedding", module)
    return found
