"""Whether each lane of an engine computes what its lane 1 does: a few made-up prompts at every start.

Lane 1 runs them first, and the outputs of its embedding, of each decoder layer and its logits are kept. A lane then
runs the same steps, and every output is compared with lane 1's and replaced by it, so that each layer is judged by its
own work alone: rounding does not add up over layers, and the first layer that differs is the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from flying_serving.errors import LaneError
from flying_serving.vllm_hooks.stages import Stage, stages

See = Callable[[str, Stage, list[torch.Tensor]], None]
"""Gets a stage's name, the stage and the tensors that it has just put out."""
FLOAT32_TOLERANCE = 0.01
HALF_TOLERANCE = 0.25
"""Largest difference that is allowed, as a share of what the layer adds to its input (of the logits: of themselves).

Rounding alone makes about 1e-6 in float32; in 16 bits up to some percent where a layer adds little to a large input.
A wrong row, column or norm makes about as much as the layer itself.
"""


@dataclass
class Outputs:
    """What lane 1's stages computed, in order, call by call.

    Attributes:
        tensors: by stage, its output tensors of each call.
        base: by stage, shape (tokens, width) of each call: what differences are measured against.
    """

    tensors: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)
    base: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How far a stage of a lane is from lane 1: 0.0 is equal, 1.0 as far as the stage's own contribution."""

    stage: str
    share: float


def tolerance(dtype: torch.dtype) -> float:
    """The largest share by which a stage may differ, for weights of this type."""
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


def record(model: Module, run: Callable[[Any], Any], steps: Iterable[Any]) -> Outputs:
    """Run the steps in lane 1 and keep what its stages compute."""
    outputs = Outputs()
    before = torch.empty(0)

    def keep(name: str, stage: Stage, found: list[torch.Tensor]) -> None:
        nonlocal before
        kept = [tensor.detach().clone() for tensor in found]
        total = _total(kept)
        added = total - before if stage.kind == "layer" and before.shape == total.shape else total
        before = total
        outputs.tensors.setdefault(name, []).append(kept)
        outputs.base.setdefault(name, []).append(added)

    with _watching(model, keep):
        for step in steps:
            run(step)
    return outputs


def compare(model: Module, run: Callable[[Any], Any], steps: Iterable[Any], expected: Outputs) -> list[Difference]:
    """Run the same steps in another lane.

    Returns:
        for each call of a stage, in order, how far it is from lane 1's.
    """
    differences: list[Difference] = []
    calls: dict[str, int] = {}

    def judge(name: str, stage: Stage, found: list[torch.Tensor]) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        kept = expected.tensors[name][call]
        share = _share(stage, found, kept, expected.base[name][call])
        differences.append(Difference(name, share))
        if share < float("inf"):
            for mine, theirs in zip(found, kept, strict=bool(found)):
                mine.copy_(theirs)

    with _watching(model, judge):
        for step in steps:
            run(step)
    return differences


def refusal(size: int, differences: list[Difference], allowed: float) -> str | None:
    """Why a lane must not serve, or None.

    Args:
        size: engines in the lane's group.
        differences: in the order of the computation.
        allowed: the tolerance.
    """
    if not differences:
        return f"group size {size}: nothing of this lane could be compared with lane 1"
    wrong = [difference for difference in differences if not difference.share <= allowed]
    if not wrong:
        return None
    largest = max(wrong, key=lambda difference: difference.share)
    return (
        f"group size {size}: this lane does not compute what lane 1 does: {wrong[0].stage} is the first layer that "
        f"differs, the largest difference is {largest.share:.2g} of the output of {largest.stage} "
        f"({allowed:g} is allowed). Leave {size} out of --group-sizes, and please report this model"
    )


def require_alike(size: int, differences: list[Difference], allowed: float, together: Callable[[bool], bool]) -> float:
    """The largest difference of a lane, once all its members have compared theirs.

    Args:
        together: takes whether this engine refuses; returns whether any does, on all members at the same time.

    Raises:
        LaneError: on every member if any refuses.
    """
    reason = refusal(size, differences, allowed)
    if together(reason is not None):
        raise LaneError(reason or f"group size {size}: another member of the group refuses this lane")
    return max(difference.share for difference in differences)


@contextmanager
def _watching(model: Module, see: See) -> Iterator[None]:
    """While the body runs, `see` gets each stage and its output tensors."""
    with ExitStack() as stack:
        for name, stage in stages(model).items():
            handle = stage.module.register_forward_hook(partial(_seen, see, name, stage))
            stack.callback(handle.remove)
        yield


def _seen(see: See, name: str, stage: Stage, _module: Module, _inputs: Any, out: Any) -> None:
    see(name, stage, _tensors(out))


def _tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a module's output."""
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def _total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Shape (tokens, width): the residual stream, whose summands a layer may return apart."""
    if not tensors:
        return torch.empty(0, 1)
    shape = tensors[0].shape
    alike = [tensor for tensor in tensors if tensor.shape == shape]
    return torch.stack([tensor.float() for tensor in alike]).sum(0).reshape(-1, shape[-1])


def _share(stage: Stage, found: list[torch.Tensor], expected: list[torch.Tensor], base: torch.Tensor) -> float:
    """The difference of the token in the middle; of an embedding, which rounds nothing, the largest.

    In the middle, because a token whose router is undecided between two experts may choose another one.
    """
    if stage.kind == "logits" and not found:  # only the group's first rank gathers them
        return 0.0
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return float("inf")
    apart = (_total(found) - _total(expected)).norm(dim=1)
    size = base.norm(dim=1)
    known = torch.isfinite(size) & (size > 0)  # what lane 1 itself cannot compute says nothing
    if not known.any():
        return 0.0
    shares = torch.nan_to_num(apart[known] / size[known], nan=float("inf"), posinf=float("inf"))
    return float(shares.max() if stage.kind == "embedding" else shares.median())
