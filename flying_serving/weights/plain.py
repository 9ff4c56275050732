"""Bind tensors that vLLM does not cut by a layer class: norms, scales, sinks, routers, and every
buffer.

A lane's model is built with parameters on the meta device and buffers as the model computes them.
Afterwards each tensor that can be reached from it must be lane 1's or a view of it. One of COMPUTED
may have memory of its own if it equals lane 1's. Otherwise the lane is refused: a tensor that is
not bound has no values of a checkpoint.
"""

import gc
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Set
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from vllm.config import CompilationConfig, VllmConfig
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper import PunicaWrapperBase
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import StageMissingLayer

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.weights.loading import saved_buffers
from flying_serving.weights.rule import Layer, Rule

COMPUTED = {"alibi_slopes", "weight"}
"""Plain attributes that vLLM computes, and that a lane may have of its own if they equal lane 1's.
A `weight` that is no parameter is the ones of a norm without weights.
"""
KEPT_ON_CPU = {"_k_scale_cpu", "_v_scale_cpu", "_k_scale_float", "_v_scale_float"}
"""Plain attributes of attention layers that vLLM keeps on the CPU, or as numbers, when it has
loaded a model. A lane is not loaded, so its own are of no use.
"""
_OPAQUE = (
    *(type(None), bool, int, float, str, bytes, type, ModuleType, BuiltinFunctionType),
    *(torch.dtype, torch.device, VllmConfig, CompilationConfig),
    *(StageMissingLayer, LoRAModelManager, PunicaWrapperBase),
)
"""Types in which no tensor of the model is looked for. vLLM's configuration names layers, which are
in the model as well. A missing layer stands for a part that is not loaded, such as the encoder of a
model that is served for text alone. vLLM's managers of adapters list wrappers that are in the
model, and have the places of a step's tokens.
"""
_REGISTERED = re.compile(r"_(?:modules|parameters|buffers)\.")


class Whole(Rule):
    """A layer that no rank cuts, or that the model itself cuts. `bound`: names of its tensors that
    are bound elsewhere.
    """

    of = Module
    bound: Collection[str] = ()

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Rule` and `bind_whole`."""
        if degree > 1:
            bind_whole(self.name, layer.module, self.full, rank, degree, self.bound)


def own_tensors(module: Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module itself, by name, without its submodules'."""
    options = {"recurse": False, "remove_duplicate": False}
    return dict([*module.named_parameters(**options), *module.named_buffers(**options)])


def bind_whole(
    name: str, layer: Module, full: Module, rank: int, degree: int, but: Collection[str] = ()
) -> None:
    """Bind a layer's parameters and buffers to lane 1's, or to this rank's part of them where the
    model itself has cut them.

    `full`: the layer of that name in lane 1's model. `but`: names of tensors that are bound
    already.

    Raises:
        WeightError: naming a tensor that is neither, or a computed buffer that differs from the
            part.
    """
    # vLLM itself may have packed its weight, which then has no shape
    replicated = isinstance(layer, ReplicatedLinear)
    if replicated:
        layer.__dict__.update({k: v for k, v in full.__dict__.items() if k == "cpu_linear"})
    theirs = own_tensors(full)
    parameters = {key for key, _ in layer.named_parameters(recurse=False)}
    loaded = dict(saved_buffers(layer))
    for key, mine in own_tensors(layer).items():
        if key in but:
            continue
        if key not in theirs:
            raise WeightError(f"{name}.{key}: lane 1 has no tensor of this name")
        if mine is theirs[key]:
            continue
        full_tensor = theirs[key].detach()
        part = (
            full_tensor
            if replicated
            else part_of(f"{name}.{key}", full_tensor, mine.shape, rank, degree)
        )
        if key in parameters:
            # attention layers and experts may hold it too
            swap_tensors(mine, Parameter(part, requires_grad=False))
        elif (key in loaded and part.shape == full_tensor.shape) or _equal(part, mine):
            mine.data = part  # and so for every object that holds it
        else:
            raise WeightError(f"{name}.{key}: what a lane computes is no part of what lane 1 has")
    for key in KEPT_ON_CPU & vars(layer).keys() & vars(full).keys():
        setattr(layer, key, getattr(full, key))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    alike = (left.dtype, left.device) == (right.dtype, right.device)
    return alike and torch.equal(left, right)


def part_of(
    name: str, full: torch.Tensor, shape: torch.Size, rank: int, degree: int
) -> torch.Tensor:
    """Return a view of `full` in this shape: all of it, or in one dimension the rank's part.

    If there are fewer parts than ranks, neighbouring ranks share one, as vLLM replicates KV heads.

    Raises:
        WeightError: naming the tensor, if no cut along one dimension has this shape.
    """
    if full.shape == shape:
        return full
    cut = [d for d, (have, want) in enumerate(zip(full.shape, shape, strict=False)) if have != want]
    if full.dim() == len(shape) and len(cut) == 1 and shape[cut[0]]:
        parts, rest = divmod(full.shape[cut[0]], shape[cut[0]])
        if not rest and parts and degree % parts == 0:
            return full.narrow(cut[0], rank * parts // degree * shape[cut[0]], shape[cut[0]])
    raise WeightError(
        f"{name}: shape {tuple(shape)} in a lane is no part of {tuple(full.shape)} in lane 1"
    )


def refuse_foreign(
    model: Module, lane1: Module, storages: Set[int], rank: int, degree: int
) -> None:
    """Raise WeightError for the first tensor of a lane's bound model that is neither shared nor
    equal to its part of lane 1's.

    `storages`: addresses of the storages that lanes share.
    """
    for path, mine, theirs in reachable(model, lane1):
        name = _REGISTERED.sub("", path)
        if mine.is_meta:
            raise WeightError(
                f"{name}: no shared storage for this tensor, or it depends on weights that a "
                "lane lacks"
            )
        if not mine.numel() or mine.untyped_storage().data_ptr() in storages:
            continue
        *_, owner, key = ("", *path.split("."))
        if key not in COMPUTED or owner == "_parameters" or theirs is None:
            raise WeightError(f"{name}: has memory of its own, which nothing was loaded into")
        if not _equal(mine, part_of(name, theirs.detach(), mine.shape, rank, degree)):
            raise WeightError(f"{name}: what a lane computes is no part of what lane 1 has")


def storages(root: Any) -> set[int]:
    """Return the addresses of the storages of all tensors that can be reached from an object."""
    return {tensor.untyped_storage().data_ptr() for _, tensor, _ in reachable(root)}


def reachable(
    root: Any, other: Any = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield each tensor that can be reached from an object, once: through attributes, containers,
    closures and methods.

    Yields the shortest path to the tensor, the tensor, and the tensor at this path in `other`,
    built alike, if there is one.
    """
    seen: set[int] = set()
    left: deque[tuple[str, Any, Any]] = deque([("", root, other)])
    while left:
        path, mine, theirs = left.popleft()
        if id(mine) in seen:
            continue
        seen.add(id(mine))
        if isinstance(mine, torch.Tensor):
            yield path, mine, theirs if isinstance(theirs, torch.Tensor) else None
            continue
        others = _parts(theirs) if type(theirs) is type(mine) else {}
        start = f"{path}." if path else ""
        for key, part in _parts(mine).items():
            if not isinstance(part, _OPAQUE):
                left.append((f"{start}{key}", part, others.get(key)))


def _parts(value: Any) -> Mapping[Any, Any]:
    """Return the parts of an object, by name or place."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple | set | frozenset | deque):
        return dict(enumerate(value))
    if isinstance(value, partial):
        return {"function": value.func, "arguments": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"method": value.__func__, "self": value.__self__}
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: content for name, cell in cells for content in gc.get_referents(cell)}
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    attributes = getattr(value, "__dict__", None)
    return {name: getattr(value, name, None) for name in names} | (
        attributes if isinstance(attributes, dict) else {}
    )
