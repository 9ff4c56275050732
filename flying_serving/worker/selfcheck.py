"""The check that each lane of an engine computes the same as its lane 1, on a few made-up prompts
at every start.

Lane 1 runs them first. The check keeps the outputs of its embedding, of each product that ranks
sum, of each decoder layer, and its logits. A lane then runs the same steps. Every output is
compared with lane 1's and replaced by it, so that each is compared by its own work alone. Rounding
then does not add up, and the first output that differs is the wrong one.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.stages import LAYERS, ComparedModule, Kind, stages

See = Callable[[str, ComparedModule, list[torch.Tensor], list[torch.Tensor]], None]
"""Gets a stage's name, the stage, its input tensors and the output tensors that it has just
computed.
"""
FLOAT32_TOLERANCE = 0.01
HALF_TOLERANCE = 0.05
"""Largest difference that is allowed: see `_share`.

Before one rounding is taken off, correct tiny models differ by 1e-6 in float32, by up to 0.005 in
bfloat16 and 0.0004 in float16. Of the product after attention in bfloat16, slopes of another rank's
heads make 0.13. A lost bias of queries makes 0.11 there and a lost norm of queries 0.5.
"""
TOKENS: dict[Kind, float] = {
    "embedding": 1.0,
    "product": 0.95,
    "layer": 0.95,
    "routed": 0.5,
    "logits": 0.95,
}
"""The token that decides, of all in the order of their differences: 1.0 is the worst, 0.5 the
middle one.

An embedding rounds nothing. Behind a router a token that is undecided between two experts may
choose another one.
"""


@dataclass
class LayerOutputs:
    """The outputs of lane 1's stages, by stage, for each call.

    `tensors`: the output tensors. `base`: the norms that differences are measured against, shape
    (tokens).
    """

    tensors: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)
    base: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How far a stage of a lane is from lane 1: 0.0 is equal, 1.0 as far as the stage's own
    contribution.

    It is infinite where nothing can be compared: another number of calls than in lane 1, no
    numbers, or another shape.
    """

    stage: str
    share: float


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest share by which a stage may differ, for weights of this type."""
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


def record(
    model: Module,
    run: Callable[[Any], Any],
    steps: Iterable[Any],
    kinds: Collection[Kind] = tuple(TOKENS),
) -> LayerOutputs:
    """Run the steps in lane 1. Returns the outputs of its stages of these kinds."""
    outputs = LayerOutputs()

    def keep(
        name: str, stage: ComparedModule, inputs: list[torch.Tensor], found: list[torch.Tensor]
    ) -> None:
        outputs.tensors.setdefault(name, []).append([tensor.detach().clone() for tensor in found])
        outputs.base.setdefault(name, []).append(_added(inputs, found))

    with _watching(model, keep, kinds):
        for step in steps:
            run(step)
    return outputs


def compare(
    model: Module,
    run: Callable[[Any], Any],
    steps: Iterable[Any],
    expected: LayerOutputs,
    tokens: Mapping[Kind, float] = TOKENS,
) -> list[Difference]:
    """Run the same steps in another lane. `tokens`: as TOKENS, of the kinds that were recorded.

    Returns:
        for each call of a stage, in order, how far it is from lane 1's. The stages with fewer calls
            than in lane 1 come last. Nothing if no layer was called, or no stage of these kinds.
    """
    differences: list[Difference] = []
    calls: Counter[str] = Counter()

    def check(
        name: str, stage: ComparedModule, _inputs: list[torch.Tensor], found: list[torch.Tensor]
    ) -> None:
        call, of_lane1 = calls[name], expected.tensors.get(name, [])
        calls[name] += 1
        if call >= len(of_lane1):
            differences.append(Difference(name, inf))
            return
        kept = of_lane1[call]
        share = _share(stage.kind, found, kept, expected.base[name][call], tokens[stage.kind])
        differences.append(Difference(name, share))
        if found and share < inf:
            for mine, theirs in zip(found, kept, strict=True):
                mine.copy_(theirs)

    with _watching(model, check, tokens):
        for step in steps:
            run(step)
    needed = set(LAYERS) & set(tokens) or set(tokens)
    if not any(stage.kind in needed and name in calls for name, stage in stages(model).items()):
        return []
    fewer = [name for name, of_lane1 in expected.tensors.items() if calls[name] < len(of_lane1)]
    return differences + [Difference(name, inf) for name in fewer]


def refusal(size: int, differences: list[Difference], allowed: float) -> str | None:
    """Return why a lane for groups of `size` must not serve, or None; `differences` are in the
    order of the computation.
    """
    if not differences:
        return f"group size {size}: no layer of this lane could be compared with lane 1"
    wrong = [difference for difference in differences if not difference.share <= allowed]
    if not wrong:
        return None
    largest = max(wrong, key=lambda difference: difference.share)
    return (
        f"group size {size}: this lane does not compute what lane 1 does: {wrong[0].stage} is "
        "the first layer that "
        f"differs, the largest difference is {largest.share:.2g} of the output of {largest.stage} "
        f"({allowed:g} is allowed). Leave {size} out of --group-sizes, and please report this model"
    )


def require_alike(
    size: int, differences: list[Difference], allowed: float, together: Callable[[bool], bool]
) -> float:
    """Return the largest difference of a lane, once all its members have compared theirs.

    `together` takes whether this engine refuses; it returns whether any does, on all members at the
    same time.

    Raises:
        LaneError: on every member if any refuses.
    """
    reason = refusal(size, differences, allowed)
    if together(reason is not None):
        raise LaneError(
            reason or f"group size {size}: another member of the group refuses this lane"
        )
    return max(difference.share for difference in differences)


@contextmanager
def _watching(model: Module, see: See, kinds: Collection[Kind]) -> Iterator[None]:
    """While the body runs, call `see` for each stage of these kinds with its inputs, before it
    changes them, and its outputs.
    """
    with ExitStack() as stack:
        for name, stage in stages(model).items():
            if stage.kind in kinds:
                for handle in _hooks(name, stage, see):
                    stack.callback(handle.remove)
        yield


def _hooks(name: str, stage: ComparedModule, see: See) -> Iterator[RemovableHandle]:
    inputs: list[torch.Tensor] = []

    def given(_module: Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs[:] = [tensor.detach().clone() for tensor in _tensors((*args, *options.values()))]

    def seen(_module: Module, _args: Any, out: Any) -> None:
        # the second is its bias, or None
        product = stage.kind == "product" and isinstance(out, tuple)
        see(name, stage, inputs, _tensors(out[0] if product else out))
        inputs.clear()

    if stage.kind in LAYERS:
        yield stage.module.register_forward_pre_hook(given, with_kwargs=True)
    yield stage.module.register_forward_hook(seen)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a module's output."""
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def _total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the residual stream, shape (tokens, width); a layer may return its summands apart."""
    if not tensors:
        return torch.empty(0, 1)
    shape = tensors[0].shape
    alike = [tensor for tensor in tensors if tensor.shape == shape]
    return torch.stack([tensor.float() for tensor in alike]).sum(0).reshape(-1, shape[-1])


def _added(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return how much a stage adds to its input, as a norm, shape (tokens).

    It is not known which of its inputs are the residual stream. The choice is all inputs of the
    output's shape, one of them or none: the one that leaves least.
    """
    total = _total(outputs)
    alike = [tensor for tensor in inputs if outputs and tensor.shape == outputs[0].shape]
    streams = [*([tensor] for tensor in alike), alike] if alike else []
    return min([total, *(total - _total(stream) for stream in streams)], key=torch.norm).norm(dim=1)


def _share(
    kind: Kind,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    base: torch.Tensor,
    token: float,
) -> float:
    """Return the difference of a token (see TOKENS) as a share of the amount that lane 1's stage
    adds there.

    Rounding of the output itself does not count: a layer may add little to a large input.
    """
    if kind == "logits" and not found:  # only the group's first rank gathers them
        return 0.0
    if not expected or [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return inf
    total = _total(expected)
    rounding = torch.finfo(found[0].dtype).eps * total.norm(dim=1)
    apart = torch.nan_to_num((_total(found) - total).norm(dim=1) - rounding, nan=inf, posinf=inf)
    known = torch.isfinite(base)  # tokens that lane 1 itself cannot compute show nothing
    shares = torch.where(apart > 0, apart / base, 0.0)[known].sort().values
    return float(shares[int(token * (len(shares) - 1))]) if len(shares) else 0.0
