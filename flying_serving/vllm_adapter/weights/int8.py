"""Products of int8 weights and activations on the CPU, in two steps: tokens are quantized once,
then multiplied with each unit of a weight.

vLLM's kernel does both in one call. A lane may have several units of a row-parallel layer. It must
not quantize the inputs of each by itself. Stock vLLM has one scale for all inputs of a rank.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm import _custom_ops as ops
from vllm.utils.torch_utils import set_default_torch_dtype

from flying_serving.vllm_adapter.weights.loading import is_keeping


def finish_int8(original: Any, self: Any, layer: Module) -> None:
    """Wrap `CPUInt8ScaledMMLinearKernel.process_weights_after_loading`: weights that will be shared
    stay as loaded.
    """
    if not is_keeping():
        original(self, layer)


@dataclass(frozen=True)
class Int8Tokens:
    """Quantized tokens: int8 (tokens, in), with a scale and, if they are not symmetric, a zero
    point for each token or for all.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None


class Int8Inputs:
    """Quantizes tokens as the kernel of a layer does. `layer`: one of its units, processed."""

    def __init__(self, kernel: Any, layer: Module) -> None:
        _, _, self._scale, self._zero_point, _ = kernel._get_layer_params(layer)
        self._is_symmetric = kernel.config.input_symmetric

    def of(self, x: torch.Tensor) -> Int8Tokens:
        """Quantize (tokens, in)."""
        return Int8Tokens(
            *ops.onednn_scaled_int8_quant(
                x.contiguous(), self._scale, self._zero_point, self._is_symmetric
            )
        )

    def parts(self, made: Int8Tokens, count: int) -> Sequence[Int8Tokens]:
        """Cut tokens by their inputs; scales and zero points are those of all inputs."""
        return [
            Int8Tokens(numbers.contiguous(), made.scales, made.zero_points)
            for numbers in made.numbers.chunk(count, 1)
        ]


class Int8Unit:
    """A unit of a weight, which vLLM's kernel has processed.

    `parameters`: those of a layer with this unit alone, as a checkpoint has them. `widths`: outputs
    of each weight in the unit. `dtype`: of the products.
    """

    def __init__(
        self,
        kernel: Any,
        layer: Any,
        parameters: Mapping[str, torch.Tensor],
        widths: Sequence[int],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.kernel, self.layer = copy.copy(kernel), copy.copy(layer)
        self._bias = None if bias is None else bias.to(dtype)
        self.layer.__dict__["_parameters"] = dict(layer._parameters) | {
            key: Parameter(tensor, requires_grad=False) for key, tensor in parameters.items()
        }
        self.layer.logical_widths = list(widths)
        with set_default_torch_dtype(dtype):
            self.kernel.process_weights_for_onednn(self.layer)
        *_, self._adjustment = self.kernel._get_layer_params(self.layer)

    def multiply(self, x: Int8Tokens, out: torch.Tensor) -> None:
        """Write the product into (tokens, out)."""
        ops.onednn_scaled_mm(
            self.kernel.dnnl_handler,
            x.numbers,
            out,
            x.scales,
            x.zero_points,
            self._adjustment,
            self._bias,
        )
