"""A model's modules without its weights, as a rank of any degree would build them."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils import swap_tensors
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from flying_serving.vllm_adapter.kv.windows import with_all_kv
from flying_serving.vllm_adapter.patches.tensor_parallel import activate
from flying_serving.vllm_adapter.weights.loading import parameters_on_meta

_JOIN_S = 60
_NUMBERED = re.compile(r"(.+?)\.(\d+)(?:\.(.*))?")
LayerKind = tuple[str, tuple[str, ...]]
"""The list that a layer is in, and a description of each module of the layer."""


def module_tree(config: VllmConfig, device: torch.device) -> Module:
    """Build the modules of a rank of the active tensor-parallel group for `config`, their
    parameters on the meta device.

    Tensors that a model computes itself (rotary tables, ALiBi slopes) are real, and of this rank,
    on `device`.
    """
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with (
        set_current_vllm_config(config),
        dtype,
        torch.random.fork_rng(devices=[]),
        device,
        parameters_on_meta(),
    ):
        tree = initialize_model(config, model_config=config.model_config).eval()
    hold_parameters(tree)
    return tree


def hold_parameters(tree: Module) -> None:
    """Let plain attributes of modules that are the data of a parameter be that parameter, which is
    replaced later for all its holders. In some models a router's bias has such a second name.
    """
    owners = {_place(parameter): parameter for parameter in tree.parameters()}
    for module in tree.modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(module)[key] = owners.get(_place(value), value)


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Return where a tensor lies, also without memory: its storage is one object for all views."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


def layer_kinds(tree: Module) -> dict[LayerKind, int]:
    """Return each kind of layer in a model's lists of layers, with its first index in its list.

    Layers are of a kind if their modules have the same classes, shapes and windows, and have KV of
    their own or not.
    """
    layers: dict[tuple[str, int], list[str]] = defaultdict(list)
    # a shared module is a part of each of its layers
    for name, module in tree.named_modules(remove_duplicate=False):
        if found := _NUMBERED.fullmatch(name):
            layers[found[1], int(found[2])].append(f"{found[3] or ''}: {_description(module)}")
    kinds: dict[LayerKind, int] = {}
    for (path, number), parts in sorted(layers.items()):
        kinds.setdefault((path, tuple(parts)), number)
    return kinds


def _description(module: Module) -> str:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    window = getattr(module, "sliding_window", None)
    own_kv = getattr(module, "kv_sharing_target_layer_name", None) is None
    return f"{type(module).__qualname__} {shapes} {window} {own_kv}"


def uncut_attention(tree: Module) -> str | None:
    """Return the name of the first attention of a lane's model whose projections vLLM keeps whole.
    Its heads are cut all the same. None if there is no such attention.

    vLLM's Transformers backend builds this where a model has no plan of tensor parallelism, and its
    projections are none that vLLM fuses.
    """
    for name, _ in getattr(tree, "attention_fusers", {}).values():
        parts = list(tree.get_submodule(name).modules())
        is_linear = any(isinstance(part, LinearBase) for part in parts)
        if is_linear and not any(isinstance(part, ColumnParallelLinear) for part in parts):
            return str(name)
    return None


def give_data(tree: Module) -> None:
    """Replace each tensor on the meta device by one number, seen in that shape: with an address,
    and hardly any memory.
    """
    for module in tree.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_meta:
                data = torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                is_parameter = isinstance(tensor, Parameter)
                swap_tensors(tensor, Parameter(data, requires_grad=False) if is_parameter else data)


def kv_config(config: VllmConfig, available: int) -> KVCacheConfig:
    """Return the KV cache of an engine with `available` bytes for it, whose layers were built for
    `config`.

    Raises:
        ValueError: vLLM's, if they do not hold one request of the longest length.
    """
    with set_current_vllm_config(config):
        register_all_kvcache_specs(config)
        specs = with_all_kv(get_kv_cache_spec(config), config.cache_config.block_size)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
        return get_kv_cache_configs(config, [specs], [available])[0]


@contextmanager
def world_of_one(config: VllmConfig) -> Iterator[None]:
    """While the body runs, make this process, which must be in no other world, a torch world of its
    own.
    """
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(config):
        timeout = timedelta(seconds=_JOIN_S)
        parallel_state.init_distributed_environment(
            1, 0, f"file://{scratch}/world", 0, "gloo", timeout
        )
        parallel_state.initialize_model_parallel(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def first_of(degree: int) -> Any:
    """While the body runs, this process, a world of its own, is rank 0 of a tensor-parallel group
    of `degree`.
    """
    return activate(_FirstOf(parallel_state.get_tp_group(), degree))


class _FirstOf:
    """The group of one rank, except for its size: enough to build modules, none of which is run."""

    def __init__(self, alone: Any, degree: int) -> None:
        self._alone = alone
        self.world_size = degree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alone, name)
