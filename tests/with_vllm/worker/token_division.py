"""A step of a small decoder whose tokens the members of a group divide."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from tests.with_vllm.worker.small_decoder import Model

MEMBERS = 5
"""They do not divide the tokens of STEPS, so that the last one has rows of no token."""


def divided(lane1: Model, lane: Model, rank: int) -> Callable[[torch.Tensor], None]:
    """Return what makes a token parallel step: lane 1's layers of a share, the lane's logits."""

    def step(tokens: torch.Tensor) -> None:
        each = -(-len(tokens) // MEMBERS)
        share = tokens[rank * each : (rank + 1) * each]
        x, residual = lane1.embed(pad(share, [0, each - len(share)])), None
        for layer in lane1.layers:
            x, residual = layer(x, residual)
        whole, rest = lane.embed.weight[tokens], None
        with torch.no_grad():
            for layer in Model().layers:
                whole, rest = layer(whole, rest)
        lane.logits(lane.embed.weight, whole + rest)

    return step
