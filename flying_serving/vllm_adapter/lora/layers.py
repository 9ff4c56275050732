"""LoRA in lanes: vLLM's wrappers around the layers of each lane, over the adapters of lane 1."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from vllm.config import VllmConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from flying_serving.vllm_adapter.lora.engine_adapters import EngineAdapters, without

_CHECK = LoRARequest(lora_name="check", lora_int_id=1, lora_path="made up")


class AdapterProducts(PunicaWrapperCPU):
    """vLLM's products with adapters on the CPU, without a term for tokens that have no adapter.

    vLLM gives such a token the slot -1. Its CPU kernels take that as an index, of the last slot. So
    in a batch with adapters the token would get the term of the adapter that is there.
    """

    _prompt_slot: int | None = None
    """While logits of one request's prompt are computed: the slot of its adapter, or -1."""

    @property
    def sampler_indices(self) -> torch.Tensor:
        """The slot of each row of logits, or the one that all of them have."""
        if self._prompt_slot is None:
            of_samples: torch.Tensor = super().sampler_indices
            return of_samples
        return torch.tensor([self._prompt_slot], device=self.device)

    @contextmanager
    def one_prompt(self, slot: int) -> Iterator[None]:
        """While the body runs, all rows of logits have the adapter in `slot`; none if it is -1."""
        self._prompt_slot = slot
        try:
            yield
        finally:
            self._prompt_slot = None

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take the slots of a step's tokens, as vLLM does."""
        super().update_metadata(*args, **kwargs)
        self._tokens_without = self.token_lora_indices.lt(0).unsqueeze(-1)
        self._some_have_none = bool(self._tokens_without.any())

    def add_lora_linear(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the terms of a linear layer to its outputs `y` (tokens, out)."""
        if not self.no_lora:
            super().add_lora_linear(y, *args, **kwargs)

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: Any, scale: float, **kwargs: Any
    ) -> None:
        """Write the products of inputs (tokens, in) and A to `y`: 0 for a token without adapter."""
        if self._some_have_none:
            x = x.masked_fill(self._tokens_without, 0)
        super().add_shrink(y, x, lora_a_stacked, scale, **kwargs)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Add to embeddings `y` the products of rows of A (tokens, rank of an adapter) and B."""
        if not self.no_lora:
            super().add_lora_embedding(y, x.masked_fill(self._tokens_without, 0), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the terms of an LM head to logits `y`, for hidden states (samples, hidden)."""
        without = self.sampler_indices.lt(0).unsqueeze(-1)
        if not without.all():
            super().add_lora_logits(y, x.masked_fill(without, 0), *args, **kwargs)


class LaneAdapters:
    """The `lora_manager` of the runner of a group's lane: lane 1's, which has the adapters of the
    engine and the slots that they are in. The lane has the places of its own step's tokens.

    `lane1`: the manager of lane 1's runner. `layers`: the manager of the lane's wrapped layers.
    """

    def __init__(self, lane1: EngineAdapters, layers: LoRAModelManager) -> None:
        self._lane1 = lane1
        self.layers = layers

    def __getattr__(self, name: str) -> Any:
        if name == "_lane1":
            raise AttributeError(name)
        return getattr(self._lane1, name)

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Load the adapters of a step, where they have no slot, and say which slot each of its
        tokens uses.

        `requests`: vLLM's LoRARequest of each adapter. `mapping`: vLLM's LoRAMapping.
        """
        missing = self._lane1.load(requests)
        if mapping is not None:
            # vLLM makes another list when it removes all adapters
            self.layers.lora_index_to_id = self._lane1._adapter_manager.lora_index_to_id
            self.layers.set_adapter_mapping(without(mapping, missing))


def take_over(runner: Any, run_dir: str, engine: int) -> None:
    """Let the runner of lane 1 load adapters by `EngineAdapters`, and compute with them by
    `AdapterProducts`.
    """
    _use_own_products(runner)
    runner.lora_manager = EngineAdapters(runner.lora_manager, run_dir, engine)


def _use_own_products(runner: Any) -> None:
    """Let the wrapped layers of a runner compute with `AdapterProducts`."""
    manager = runner.lora_manager._adapter_manager
    products = AdapterProducts(manager.max_num_batched_tokens, manager.max_num_seqs, manager.device)
    for prefix in manager.punica_wrapper_mapping:
        manager.punica_wrapper_mapping[prefix] = products
    for layer in manager.modules.values():
        layer.set_mapping(products)


def prompt_logprobs_by_request(
    original: Callable[..., dict[str, Any]],
    self: Any,
    hidden_states: torch.Tensor,
    num_scheduled_tokens: dict[str, int],
) -> dict[str, Any]:
    """Wrap `GPUModelRunner._get_prompt_logprobs_dict`: the logits of each prompt have the adapter
    of its own request.

    vLLM would take the adapters of the requests that the step samples for.
    """
    if self.lora_config is None or not self.num_prompt_logprobs:
        return original(self, hidden_states, num_scheduled_tokens)
    manager = self.lora_manager
    layers = manager.layers if isinstance(manager, LaneAdapters) else manager._adapter_manager
    (products,) = set(layers.punica_wrapper_mapping.values())
    found: dict[str, Any] = {}
    not_done: dict[str, int] = {}
    for request_id, count in self.num_prompt_logprobs.items():
        self.num_prompt_logprobs = {request_id: count}
        slot = -1
        if request_id in num_scheduled_tokens:
            row = self.input_batch.req_id_to_index[request_id]
            adapter = int(self.input_batch.request_lora_mapping[row])
            # an adapter that could not be read has no slot
            slots = layers.lora_index_to_id
            slot = slots.index(adapter) if adapter in slots else -1
        with products.one_prompt(slot):
            found |= original(self, hidden_states, num_scheduled_tokens)
        not_done |= self.num_prompt_logprobs
    self.num_prompt_logprobs = not_done
    return found


def hash_keys_of_adapter(original: Callable[[Any], list[Any]], request: Any) -> list[Any]:
    """Wrap `_gen_lora_extra_hash_keys`: an adapter that is loaded again, from the same folder and
    under the same name, has none of the prefixes of before: its files may be others.
    """
    return [(*key, request.lora_request.lora_int_id) for key in original(request)]


def wrap_layers(runner: Any, model: Module, config: VllmConfig, lane1: Any) -> None:
    """Wrap the layers of a lane's model as vLLM wraps those of lane 1's, if adapters are served.

    The model's parameters are on the meta device, and so are the stacked tensors of its wrappers.
    `runner`, `lane1`: vLLM's runners of the lane and of lane 1.
    """
    if config.lora_config is None:
        return
    runner.load_lora_model(model, config, runner.device)
    _use_own_products(runner)
    layers = runner.lora_manager._adapter_manager
    runner.lora_manager = LaneAdapters(lane1.lora_manager, layers)


@contextmanager
def made_up_adapter(runner: Any) -> Iterator[LoRARequest | None]:
    """While the body runs, the runner of lane 1 has an adapter with random numbers in each linear
    layer, the same in all engines. Yields vLLM's request for it; None if no adapters are served.
    """
    if runner.lora_config is None:
        yield None
        return
    manager = runner.lora_manager
    adapters = manager._adapter_manager
    manager.add_dummy_lora(_CHECK, runner.lora_config.max_lora_rank)
    adapters.activate_adapter(_CHECK.lora_int_id)
    slot = adapters.lora_index_to_id.index(_CHECK.lora_int_id)
    for name, layer in adapters.modules.items():
        for key in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, key)
            # those of a vocabulary are whole in every lane
            for part in stacked if isinstance(stacked, tuple) else ():
                limit = (3 / part.shape[-1]) ** 0.5
                generator = torch.Generator(part.device).manual_seed(zlib.crc32(name.encode()))
                part[slot].uniform_(-limit, limit, generator=generator)
    try:
        yield _CHECK
    finally:
        manager.remove_all_adapters()


def base_of(module: Module) -> Module:
    """Return the layer that computes a module's output, without vLLM's wrapper for adapters."""
    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module
