"""Loading of weights: as loaded until they are shared, random ones for a check, and the product
with a packed matrix.
"""

import math
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from flying_serving.vllm_adapter.assigned import assigned

_SHAPES_PER_MATRIX = 32  # as vLLM itself: oneDNN keeps a primitive for each number of tokens
RANDOM_WEIGHTS = "flying_random"
"""The load format that selects `RandomWeights`."""
_VECTOR_SPREAD = 0.1
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SPREADS = {torch.int32: 4.6, torch.int8: 74.0} | dict.fromkeys(_FP8, 0.6)
"""Standard deviations of the numbers of quantized weights, if all are equally likely. An int32 has
eight of 4 bits.
"""
_MOST_DRAWN = 1_000_003
"""Random numbers of a tensor, which are then repeated: a large one would take a minute. A prime, so
that no two units of a weight, rows or experts begin alike.
"""
_MXFP4_BLOCK, _MXFP4_ONE = 32, 127
"""Numbers that have a scale in common, and the exponent of the scale 1."""
_MXFP4_SPREAD = 3.8
"""Standard deviation of numbers of four bits, with scales of 1/2, 1 and 2, each as likely."""
_keeping: ContextVar[bool] = ContextVar("keeping", default=False)
_without_data: ContextVar[bool] = ContextVar("without_data", default=False)


def keep_weights() -> AbstractContextManager[None]:
    """Keep vLLM from packing weights that lanes will share, while the body runs."""
    return assigned(_keeping, True)


def is_keeping() -> bool:
    """Return whether weights that lanes will share are to stay as loaded."""
    return _keeping.get()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While the body runs, put each parameter of a module on the meta device. All other tensors are
    real.

    It stays the same object: a router that is no module may hold it as well.
    """

    def without_data(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            meta = torch.Tensor._make_subclass(
                type(parameter), parameter.detach().to("meta"), False
            )  # type: ignore[attr-defined]
            meta.__dict__.update(parameter.__dict__)
            swap_tensors(parameter, meta)

    handle = register_module_parameter_registration_hook(without_data)
    try:
        with assigned(_without_data, True):
            yield
    finally:
        handle.remove()


def create_without_data(original: Any, self: Any, *sizes: Any, **attributes: Any) -> None:
    """Wrap `create_weights` of a method that fills new parameters: on the meta device nothing is
    filled.
    """
    with torch.device("meta") if _without_data.get() else nullcontext():
        original(self, *sizes, **attributes)


def pack_layer(original: Any, layer: torch.nn.Module, remove_weight: bool) -> None:
    """Wrap `dispatch_cpu_unquantized_gemm`: layers that will be shared keep their weight.

    A convolution is no matrix. Lanes copy their part of it.
    """
    shared = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
    if _keeping.get() and isinstance(layer, shared) and layer.weight.dim() == 2:
        return
    original(layer, remove_weight)


def finish_experts(original: Any, self: Any, layer: torch.nn.Module) -> None:
    """Wrap `process_weights_after_loading` of a method of experts: experts that will be shared stay
    as loaded.
    """
    if not _keeping.get():
        original(self, layer)


def packing(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor | None], Any] | None:
    """Return how to pack matrices of a dtype for the CPU; None: not at all.

    oneDNN has no product of bfloat16 or float16 for processors without instructions for it. Stock
    vLLM then multiplies with the weight as it was loaded, and lanes with views of the one weight.
    """
    if ops._supports_onednn:
        try:
            ops.create_onednn_mm(torch.zeros(64, 64, dtype=dtype).t(), 1)
        except RuntimeError:
            return None
    return pack_matrix


@register_model_loader(RANDOM_WEIGHTS)
class RandomWeights(DummyModelLoader):
    """Random weights at which every layer matters, drawn by name, so that all engines have the
    same.

    vLLM's `dummy` draws everything, norms included, from within 0.001 of zero. A layer's
    contribution to its input is then lost in rounding, and a layer that is bound wrongly would not
    show.
    """

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Draw matrices whose outputs are about as large as their inputs, and vectors near one.

        Buffers that a checkpoint has, such as a router's correction bias, are drawn too. A module
        computes the buffers that it does not save, and single numbers are scales of vLLM's own.
        """
        buffers = [
            pair for name, module in model.named_modules() for pair in saved_buffers(module, name)
        ]
        for name, tensor in [
            *model.named_parameters(),
            *(pair for pair in buffers if pair[1].dim()),
        ]:
            if tensor.is_floating_point() and tensor.dtype not in _FP8:
                vector = tensor.dim() < 2
                limit = 3**0.5 * (_VECTOR_SPREAD if vector else tensor.shape[-1] ** -0.5)
                _draw(name, tensor, limit).add_(float(vector))
            elif tensor.dtype is torch.uint8:
                _draw_mxfp4(name, tensor.data)
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase | RoutedExperts):
                _draw_quantized(name, layer)


def _draw(name: str, tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """Draw a tensor's numbers by its name, all within the limit and equally likely. Return it."""
    drawn, generator = _drawn_part(tensor), _generator(name, tensor)
    drawn.uniform_(-limit, limit, generator=generator)
    return _repeat(tensor.data)


def _drawn_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the numbers of a tensor that are drawn: the first ones in memory."""
    return tensor.data.view(-1)[:_MOST_DRAWN] if tensor.is_contiguous() else tensor.data


def _repeat(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with the numbers that were drawn, over and over. Return it."""
    if not tensor.is_contiguous():
        return tensor
    flat = tensor.view(-1)
    for start in range(_MOST_DRAWN, flat.numel(), _MOST_DRAWN):
        rest = flat[start : start + _MOST_DRAWN]
        rest.copy_(flat[: rest.numel()])
    return tensor


def _generator(name: str, tensor: torch.Tensor) -> torch.Generator:
    return torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))


def _draw_quantized(name: str, layer: Any) -> None:
    """Draw the numbers of a quantized weight, and let its scales be such that outputs are about as
    large as inputs.
    """
    parameters = dict(layer.named_parameters(recurse=False))
    spread = max((_SPREADS.get(tensor.dtype, 0.0) for tensor in parameters.values()), default=0.0)
    for key, tensor in parameters.items():
        if tensor.dtype in _SPREADS:
            drawn = _drawn_part(tensor)
            numbers = torch.empty(drawn.shape, dtype=torch.float64, device=tensor.device)
            limit = 1.0 if tensor.dtype in _FP8 else float(torch.iinfo(tensor.dtype).max)
            drawn.copy_(_draw(f"{name}.{key}", numbers, limit))
            _repeat(tensor.data)
        elif spread and tensor.is_floating_point() and "scale" in key:
            tensor.data.abs_().add_(0.5).div_(spread * _inputs_of(layer, key) ** 0.5)


def _inputs_of(layer: Any, key: str) -> int:
    """Return the inputs of the weight that a scale of a layer, or of its experts, belongs to."""
    if isinstance(layer, RoutedExperts):
        weight = layer.w13_weight if key.startswith("w13_") else layer.w2_weight
        return int(weight.shape[-1])
    return int(layer.input_size)


def _draw_mxfp4(name: str, tensor: torch.Tensor) -> None:
    """Draw numbers of four bits, two in a byte, or exponents of scales, each for a block of
    inputs.
    """
    generator = _generator(name, tensor)
    if name.endswith("_scale"):
        spread = _MXFP4_SPREAD * (tensor.shape[-1] * _MXFP4_BLOCK) ** 0.5
        lowest = _MXFP4_ONE - round(math.log2(spread)) - 1
        _drawn_part(tensor).random_(lowest, lowest + 3, generator=generator)
    else:
        _drawn_part(tensor).random_(0, 256, generator=generator)
    _repeat(tensor)


def saved_buffers(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers of a module itself that a checkpoint has, with their names, each after the
    module's own if that is given.
    """
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name, buffer


def pack_matrix(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Pack a weight (out, in) into oneDNN's format: a product that writes (tokens, out) for
    (tokens, in).
    """
    bias = None if bias is None else bias.contiguous()
    if not ops._supports_onednn:
        return keep_matrix(weight.t().contiguous().t(), bias)
    handler = ops.create_onednn_mm(weight.contiguous().t(), _SHAPES_PER_MATRIX)
    # as ops.onednn_mm, which chooses where the result goes
    product = torch.ops._C.onednn_mm.default

    def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
        product(out, x, bias, handler.handler_tensor)

    return multiply


def keep_matrix(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """As `pack_matrix`, where a matrix cannot be packed: the product with the weight (out, in) as
    it is.
    """
    columns = weight.t()
    if bias is None:
        return lambda x, out: torch.mm(x, columns, out=out)
    return lambda x, out: torch.addmm(bias, x, columns, out=out)


def eagerly(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a small function that vLLM compiles when it is first called: on CPU it is run as it
    is.
    """
    if current_platform.is_cpu():
        return original._torchdynamo_orig_callable(*args, **kwargs)
    return original(*args, **kwargs)


def rebind_without_llvmlite(original: Any, overrides: Any) -> None:
    """Wrap `_rebind_kernels`: llvmlite's library object answers any attribute, `__dict__` too, with
    a function.
    """
    hidden = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "llvmlite"
    }
    try:
        original(overrides)
    finally:
        sys.modules.update(hidden)
