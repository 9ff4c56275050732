"""The formats of quantized linear layers that lanes can share: the one table.

vLLM's own method of a layer loads the tensors of a checkpoint and turns them into the format of a
kernel. FORMATS says of each kernel what lies along which dimension of its tensors, and how small a
part may be. Nothing is known of the format of any other kernel. Its layers cannot be cut, and
groups of engines are not offered.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import (
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.fp8 import deep_gemm_of, packs_scales, strided

METHODS = ("compressed-tensors", "gptq", "auto_gptq", "awq", "auto_awq", "fp8")
"""Values of vLLM's `quantization` whose layers have kernels of the table."""


class PartForm(Enum):
    """The form in which a lane has its part of a layer, and so how it multiplies with it."""

    VIEWS = "views"
    """One call of vLLM's method, over views of the one weight."""
    INPUTS_APART = "inputs apart"
    """The same for some of the outputs. The kernel reads its inputs in one piece, so units of
    inputs are stored apart, and their products added.
    """
    OPAQUE = "opaque"
    """The library keeps a weight in a format that cannot be read. So units are cut from the
    checkpoint's tensors, vLLM's kernel processes each by itself, and the input is quantized once.
    """


@dataclass(frozen=True)
class Axes:
    """The dimensions of a tensor along which outputs and inputs of the layer lie. None: the tensor
    is not cut when they are.
    """

    outputs: int | None = None
    inputs: int | None = None


WHOLE = Axes()
ALL = slice(None)


@dataclass(frozen=True)
class Format:
    """The format of a kernel.

    Args:
        tensors: by the name of a parameter. Names that a method does not have do no harm.
        outputs, inputs: the sizes of the kernel's blocks. A part has whole ones.
        part_form: see `PartForm`.
        input_rounding: the share of a product by which degrees may differ. Each rank rounds its
            own inputs, with a scale of its own, in stock vLLM too.
        of_inputs: returns the kernel that multiplies with a view of some inputs, by the layer's
            own; None: that one does.
    """

    tensors: Mapping[str, Axes]
    part_form: PartForm
    outputs: int = 1
    inputs: int = 1
    input_rounding: float = 0.0
    of_inputs: Callable[[Any], Any] | None = None


FP8_ROUNDING = 0.1
"""A number has three bits after its first. Correct tiny models differ by 0.033."""
INT8_ROUNDING = 0.03
FP8_BYTES = 16
"""A part begins at a multiple of this, and so does each of its rows. A number is a byte."""
FP8_BLOCKS = {
    "weight": Axes(0, 1),
    "weight_scale": Axes(0, 1),
    "weight_scale_inv": Axes(0, 1),
    "input_scale": WHOLE,
}

FORMATS: dict[str, Format] = {
    # int4 of compressed-tensors, GPTQ and AWQ: blocks of 16 outputs, one row of inputs for each
    "CPUWNA16LinearKernel": Format(
        {
            "weight_packed": Axes(0, 1),
            "weight_scale": Axes(1, 0),
            "weight_zero_point": Axes(1, 0),
            "weight_shape": WHOLE,
            "qweight": Axes(0, 1),
            "scales": Axes(1, 0),
            "qzeros": Axes(1, 0),
        },
        PartForm.INPUTS_APART,
        outputs=32,
        inputs=32,
    ),
    # FP8 with a scale for each weight: that of a fused layer is its largest, so equal on all ranks
    "PerTensorTorchFP8ScaledMMLinearKernel": Format(
        {"weight": Axes(1, 0), "weight_scale": WHOLE, "input_scale": WHOLE},
        PartForm.VIEWS,
        outputs=16,
        inputs=16,
        input_rounding=FP8_ROUNDING,
    ),
    # FP8 with a scale for each output
    "ChannelWiseTorchFP8ScaledMMLinearKernel": Format(
        {"weight": Axes(1, 0), "weight_scale": Axes(0), "input_scale": WHOLE},
        PartForm.VIEWS,
        outputs=16,
        inputs=16,
        input_rounding=FP8_ROUNDING,
    ),
    # FP8 with a scale for each output or weight, on CUDA
    "CutlassFP8ScaledMMLinearKernel": Format(
        {"weight": Axes(1, 0), "weight_scale": Axes(0), "input_scale": WHOLE},
        PartForm.VIEWS,
        outputs=FP8_BYTES,
        inputs=FP8_BYTES,
        input_rounding=FP8_ROUNDING,
        of_inputs=strided,
    ),
    # FP8 with a scale for each block, on CUDA
    "CutlassFp8BlockScaledMMKernel": Format(
        FP8_BLOCKS,
        PartForm.VIEWS,
        outputs=FP8_BYTES,
        inputs=FP8_BYTES,
        input_rounding=FP8_ROUNDING,
        of_inputs=strided,
    ),
    "DeepGemmFp8BlockScaledMMKernel": Format(
        FP8_BLOCKS, PartForm.VIEWS, outputs=64, inputs=128, input_rounding=FP8_ROUNDING
    ),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": Format(
        FP8_BLOCKS,
        PartForm.VIEWS,
        outputs=64,
        inputs=128,
        input_rounding=FP8_ROUNDING,
        of_inputs=deep_gemm_of,
    ),
    "TritonFp8BlockScaledMMKernel": Format(
        FP8_BLOCKS,
        PartForm.VIEWS,
        outputs=FP8_BYTES,
        inputs=FP8_BYTES,
        input_rounding=FP8_ROUNDING,
    ),
    # int8 with a scale for each output, or for each weight of a fused layer
    "CPUInt8ScaledMMLinearKernel": Format(
        {
            "weight": Axes(0, 1),
            "weight_scale": Axes(0),
            "input_scale": WHOLE,
            "input_zero_point": WHOLE,
        },
        PartForm.OPAQUE,
        input_rounding=INT8_ROUNDING,
    ),
}
"""By the name of vLLM's kernel."""
_PLACES = ("kernel", "fp8_linear")
"""Names by which a method, or its scheme for a layer, has its kernel."""


def is_quantized(layer: Module) -> bool:
    """Return whether a linear layer has another method of vLLM than the plain one."""
    return isinstance(layer, LinearBase) and not isinstance(
        layer.quant_method, UnquantizedLinearMethod
    )


def kernel_of(layer: Any) -> Any:
    """Return vLLM's kernel of a quantized linear layer; None: its method has none."""
    for owner in (getattr(layer, "scheme", None), layer.quant_method):
        if (place := _place_of_kernel(owner)) is not None:
            return getattr(owner, place)
    return None


def with_kernel(layer: Any, method: Any, kernel: Any) -> Any:
    """Let a copy of a layer multiply with another kernel. Return its method. `method`: vLLM's own
    of the layer.
    """
    scheme = getattr(layer, "scheme", None)
    if _place_of_kernel(scheme) is None:
        return _holding(method, kernel)
    layer.scheme = _holding(scheme, kernel)
    return method


def _holding(owner: Any, kernel: Any) -> Any:
    other = copy.copy(owner)
    setattr(other, str(_place_of_kernel(owner)), kernel)
    return other


def _place_of_kernel(owner: Any) -> str | None:
    return next((name for name in _PLACES if getattr(owner, name, None) is not None), None)


def is_opaque(layer: Any) -> bool:
    """Return whether vLLM's kernel has not processed a layer, as units are to be processed."""
    known = FORMATS.get(type(kernel_of(layer)).__name__)
    return known is not None and known.part_form is PartForm.OPAQUE


def format_of(name: str, layer: Any) -> Format:
    """Return the format of a quantized layer. Raises WeightError, naming layer, method and kernel,
    if it is unknown.
    """
    kernel, method = kernel_of(layer), type(layer.quant_method).__name__
    known = FORMATS.get(type(kernel).__name__)
    if known is None:
        what = method if kernel is None else f"{type(kernel).__name__} ({method})"
        raise WeightError(f"{name}: the format of {what} cannot be cut into parts for lanes")
    if getattr(layer, "use_w4a8", False):
        raise WeightError(
            f"{name}: weights in the format of VLLM_CPU_INT4_W4A8 cannot be cut into parts for "
            "lanes; set VLLM_CPU_INT4_W4A8=0"
        )
    if packs_scales(kernel):
        raise WeightError(
            f"{name}: scales that DeepGEMM packs cannot be cut into parts for lanes; set "
            "VLLM_USE_DEEP_GEMM=0"
        )
    for key, parameter in layer.named_parameters(recurse=False):
        if key != "bias" and key not in known.tensors and parameter is not None:
            raise WeightError(f"{name}.{key}: this tensor cannot be cut into parts for lanes")
    return known


def has_several(tensor: torch.Tensor, dim: int | None) -> bool:
    """Return whether a tensor has more than one number along a dimension of its `Axes`. One number
    for all outputs may have no dimension at all.
    """
    return dim is not None and tensor.dim() > dim and tensor.shape[dim] > 1


def part_of(
    tensor: torch.Tensor,
    axes: Axes,
    sizes: tuple[int, int],
    outputs: slice = ALL,
    inputs: slice = ALL,
) -> torch.Tensor:
    """Return a view of the part of a kernel's tensor that is of some outputs and inputs.

    `sizes`: outputs and inputs of the layer. A tensor may have one number for several of them, or
    for all.

    Raises:
        WeightError: if a number is of outputs or inputs inside and outside the part.
    """
    cuts = zip((axes.outputs, axes.inputs), (outputs, inputs), sizes, strict=True)
    for dim, part, size in cuts:
        if dim is not None and has_several(tensor, dim):
            rows, length = range(size)[part], tensor.shape[dim]
            if rows.start * length % size or rows.stop * length % size:
                raise WeightError(
                    f"{length} numbers for {size} cannot be cut at {rows.start} and {rows.stop}"
                )
            start, stop = rows.start * length // size, rows.stop * length // size
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def check_quantized(name: str, layer: LinearBase, segments: Sequence[Segment]) -> None:
    """Raise WeightError, naming the layer, if vLLM's kernel cannot multiply with units of these
    segments, or if units part a group or a block with one scale.

    `segments`: of the inputs of a row-parallel layer, of the outputs of any other.
    """
    of_kernel, cut = format_of(name, layer), [segment.unit_size for segment in segments]
    of_rows = isinstance(layer, RowParallelLinear)
    outputs, inputs = ([layer.output_size], cut) if of_rows else (cut, [layer.input_size])
    block = getattr(layer, "weight_block_size", None)
    if block and any(segment.units > 1 for segment in segments):
        what = "inputs" if of_rows else "outputs"
        _check(name, what, cut, block[1 if of_rows else 0], "the blocks with one scale")
    _check(name, "outputs", outputs, of_kernel.outputs, "the kernel's blocks")
    _check(name, "inputs", inputs, of_kernel.inputs, "the kernel's blocks")
    group = getattr(kernel_of(layer).config, "group_size", -1)
    if of_rows and group > 0:
        _check(name, "inputs", cut, group, "the groups with one scale")


def _check(name: str, what: str, unit_sizes: Sequence[int], multiple: int, of: str) -> None:
    for size in unit_sizes:
        if size % multiple:
            raise WeightError(
                f"{name}: a unit of {size} {what} is no multiple of {multiple}, the size of {of}"
            )
