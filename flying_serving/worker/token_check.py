"""The check that token parallel steps of a lane compute the same as lane 1, beside
`worker/selfcheck.py`.

Lane 1's own modules compute such a step, a member's share of the tokens each, so their outputs are
compared with the member's rows of what lane 1 computed alone. The logits are the lane's, of all
tokens.
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import inf
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import pad

from flying_serving.vllm_adapter.model_runner.stages import Kind, stages
from flying_serving.worker.selfcheck import TOKENS, Difference, LayerOutputs, compare

OF_ALL_TOKENS: tuple[Kind, ...] = ("logits",)
"""Stages that the lane computes of all tokens."""
OF_A_SHARE = tuple(kind for kind in TOKENS if kind not in OF_ALL_TOKENS)


def compare_shares(
    lane1: Module,
    lane: Module,
    run: Callable[[Any], Any],
    steps: Iterable[Any],
    expected: LayerOutputs,
    member: tuple[int, int],
) -> list[Difference]:
    """Run steps token parallel. Return how far each call of a stage is from lane 1's, as `compare`.

    Args:
        lane1, lane: the models.
        run: makes a token parallel step of the lane.
        steps: the steps that lane 1 made.
        expected: what it computed.
        member: this member's rank in the group, and the number of members.
    """
    mine = share_of(_only(expected, lane1, OF_A_SHARE), *member)
    found: list[Difference] = []

    def run_all(of_group: Iterable[Any]) -> None:
        kinds = {kind: TOKENS[kind] for kind in OF_A_SHARE}
        found.extend(compare(lane1, run, of_group, mine, kinds))

    kinds = {kind: TOKENS[kind] for kind in OF_ALL_TOKENS}
    logits = compare(lane, run_all, [steps], _only(expected, lane1, OF_ALL_TOKENS), kinds)
    return found and found + logits


def share_of(outputs: LayerOutputs, rank: int, members: int) -> LayerOutputs:
    """Return the rows that one member computes of a step whose tokens are divided evenly.

    The last rows may be those of no token: they have an infinite norm, so they are not compared.
    """
    part = partial(_rows, rank=rank, members=members)
    tensors = {
        name: [[part(tensor) for tensor in call] for call in calls]
        for name, calls in outputs.tensors.items()
    }
    base = {
        name: [part(norms, rest=inf) for norms in calls] for name, calls in outputs.base.items()
    }
    return LayerOutputs(tensors, base)


def _rows(whole: torch.Tensor, rank: int, members: int, rest: float = 0.0) -> torch.Tensor:
    share = -(-whole.shape[0] // members)
    rows = whole[rank * share : (rank + 1) * share]
    return pad(rows, [0, 0] * (whole.dim() - 1) + [0, share - rows.shape[0]], value=rest)


def _only(outputs: LayerOutputs, model: Module, kinds: Collection[Kind]) -> LayerOutputs:
    """Return the outputs of stages of these kinds."""
    names = {name for name, stage in stages(model).items() if stage.kind in kinds}
    return LayerOutputs(
        {name: calls for name, calls in outputs.tensors.items() if name in names},
        {name: calls for name, calls in outputs.base.items() if name in names},
    )
