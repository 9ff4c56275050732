"""torch.compile in lanes: lane 1 is compiled as vLLM would, and lanes of groups are eager.

vLLM compiles an instance of a model's class. A group's lane is another instance, which calls the
class's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.library import Library
from torch.nn import Module
from vllm import ir
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

_LIBRARY = Library("flying_serving", "FRAGMENT")
EAGER = (None, CompilationMode.NONE)
_BASE_MODES = ("all", "none")


def is_compiled(config: VllmConfig) -> bool:
    """Return whether vLLM compiles lane 1 of this configuration."""
    eager = config.model_config.enforce_eager or config.compilation_config.mode in EAGER
    return not eager


def keep_eager(config: VllmConfig) -> None:
    """Let a group's lane run without compilation. `config`: its own, a copy of lane 1's.

    Its operations are vLLM's own kernels, as in an eager server. Its graphs are of decode steps
    alone: vLLM cuts graphs of other steps out of compiled code.
    """
    if not is_compiled(config):
        return
    config.kernel_config.ir_op_priority = eager_priorities(config)
    compilation = config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.ir_enable_torch_wrap = False
    others = [name for name in compilation.custom_ops if name not in _BASE_MODES]
    compilation.custom_ops = ["all", *others]
    mode = compilation.cudagraph_mode
    has_decodes = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
    compilation.cudagraph_mode = (
        CUDAGraphMode.FULL_DECODE_ONLY if has_decodes else CUDAGraphMode.NONE
    )


def eager_priorities(config: VllmConfig) -> IrOpPriorityConfig:
    """Return which implementations of vLLM's IR operations, norms among them, eager code takes in a
    server with this lane 1.

    vLLM chooses once for a process, and for compiled code: torch's own, which the compiler fuses.
    Eagerly these are some ten kernels for each norm. An operation for which a user has chosen keeps
    that choice.
    """
    eager = copy.copy(config)
    eager.compilation_config = copy.copy(config.compilation_config)
    eager.compilation_config.mode = CompilationMode.NONE
    by_default = asdict(current_platform.get_default_ir_op_priority(config))
    chosen = asdict(config.kernel_config.ir_op_priority)
    of_eager = asdict(current_platform.get_default_ir_op_priority(eager))
    users = {name: order for name, order in chosen.items() if order != by_default[name]}
    return IrOpPriorityConfig(**(of_eager | users))


@contextmanager
def eager_operations(priorities: IrOpPriorityConfig | None) -> Iterator[None]:
    """While the body runs, vLLM's IR operations take these implementations, and are no operations
    of torch, as a compiler needs them. None: they stay as vLLM has set them for the process.
    """
    if priorities is None:
        yield
        return
    with priorities.set_priority(), ir.enable_torch_wrap(False):
        yield


@contextmanager
def uncompiled(model: Module) -> Iterator[None]:
    """While the body runs, the model's own code runs in place of the compiled one."""
    compiled: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper) and not module.do_not_compile  # type: ignore[attr-defined]
    ]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False


class HiddenProduct:
    """The `quant_method` of a layer whose product is one operation for torch.compile, with a shape
    and no contents.

    The compiled code has the layer's name. It finds the product as vLLM's attention finds its
    layer: in the layers of the forward context, so in those of the lane that runs.

    `product`: the layer's own `quant_method`. `width`: the columns of its outputs.
    """

    def __init__(self, product: Any, name: str, width: int) -> None:
        self.product = product
        self._name = name
        self._width = width

    def apply(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: (..., in) -> (..., width). The product has the bias."""
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.flying_serving.product(x, self._width, self._name)
            return out
        result: torch.Tensor = self.product.apply(layer, x)
        return result


def _product(x: torch.Tensor, width: int, name: str) -> torch.Tensor:
    hidden = get_forward_context().no_compile_layers[name]
    out: torch.Tensor = hidden.apply(None, x)
    return out


def _product_shape(x: torch.Tensor, width: int, name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width))


direct_register_custom_op("product", _product, fake_impl=_product_shape, target_lib=_LIBRARY)
