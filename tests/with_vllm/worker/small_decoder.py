"""A decoder in small, whose layers put out what those of vLLM do."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

WIDTH, VOCABULARY, LAYERS, TOKENS = 16, 32, 3, 12


class Embedding(VocabParallelEmbedding):
    """vLLM's class, so that it is found, with a plain look-up."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


class Logits(LogitsProcessor):
    """vLLM's class, with the product alone. Without `gathers` it is that of a rank that gets no
    logits.
    """

    def __init__(self, gathers: bool) -> None:
        nn.Module.__init__(self)
        self.gathers = gathers

    def forward(self, head: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        return x @ head.t() if self.gathers else None


class Output(RowParallelLinear):
    """vLLM's class, with the product alone and the bias that it hands out beside it."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.reduce_results = True
        self.weight = nn.Parameter(0.05 * torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:  # type: ignore[override]
        return x @ self.weight.t(), self.bias


class Layer(nn.Module):
    """Returns its own part and the residual apart, as vLLM's decoder layers do, and adds to its
    input in place.

    What attention stands for adds little beside what the rest adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.attention = Output()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x.clone() if residual is None else residual.add_(x)
        residual.add_(self.attention(nn.functional.normalize(residual) * self.norm)[0])
        return torch.tanh(self.down(residual)), residual


class Model(nn.Module):
    """A decoder in small; the same seed makes the same weights."""

    def __init__(self, gathers: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.embed = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.logits = Logits(gathers)

    def step(self, tokens: torch.Tensor) -> None:
        x, residual = self.embed(tokens) * self.scale, None
        for layer in self.layers:
            x, residual = layer(x, residual)
        self.logits(self.embed.weight, x + residual)


STEPS = [torch.arange(TOKENS), torch.arange(TOKENS) + TOKENS]
