"""Products with adapters: a token has the term of its own adapter, or none."""

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

from flying_serving.vllm_adapter.lora.layers import AdapterProducts, hash_keys_of_adapter
from tests.unit.memory.layers import numbers
from tests.with_vllm.vllm_adapter.kv_lanes import make

ACTIVE = [11, 12]
"""The adapter in each slot."""
RANK, INPUTS, OUTPUTS = 2, 4, 6
TOKENS = (0, 12, 0, 11)
"""The adapter of each token, 0 for none."""
VOCABULARY = 8


def products(tokens: tuple[int, ...], samples: tuple[int, ...] | None = None) -> AdapterProducts:
    made = AdapterProducts(16, 16, torch.device("cpu"))
    mapping = LoRAMapping(tokens, tokens if samples is None else samples, is_prefill=True)
    made.update_metadata(mapping, ACTIVE, len(ACTIVE) + 1, VOCABULARY)
    return made


def a() -> torch.Tensor:
    return numbers(1, len(ACTIVE), 1, RANK, INPUTS)


def b() -> torch.Tensor:
    return numbers(2, len(ACTIVE), 1, OUTPUTS, RANK)


def expected(x: torch.Tensor, adapters: tuple[int, ...]) -> torch.Tensor:
    rows = [
        b()[ACTIVE.index(adapter), 0] @ a()[ACTIVE.index(adapter), 0] @ token
        if adapter
        else torch.zeros(OUTPUTS)
        for token, adapter in zip(x, adapters, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [TOKENS, (0, 0, 0, 0), (11, 11, 12, 12)])
def test_linear_layers_add_the_term_of_each_tokens_adapter(tokens: tuple[int, ...]) -> None:
    x, y = numbers(3, len(tokens), INPUTS), numbers(4, len(tokens), OUTPUTS)
    found = y.clone()
    products(tokens).add_lora_linear(found, x, (a(),), (b(),), 1.0, (OUTPUTS,))
    assert torch.equal(found - y, expected(x, tokens))


@pytest.mark.parametrize("samples", [(0, 12), (0, 0), (11, 12)])
def test_logits_have_the_term_of_each_requests_adapter(samples: tuple[int, ...]) -> None:
    x, y = numbers(3, len(samples), INPUTS), numbers(4, len(samples), OUTPUTS)
    found = y.clone()
    products(TOKENS, samples).add_lora_logits(found, x, a(), b(), 1.0)
    assert torch.equal(found - y, expected(x, samples))


@pytest.mark.parametrize(("slot", "adapter"), [(-1, 0), (0, 11), (1, 12)])
def test_logits_of_one_prompt_have_the_term_of_its_adapter(slot: int, adapter: int) -> None:
    """However many requests the step samples for."""
    x, y = numbers(3, 5, INPUTS), numbers(4, 5, OUTPUTS)
    found, made = y.clone(), products(TOKENS, (0, 12))
    with made.one_prompt(slot):
        made.add_lora_logits(found, x, a(), b(), 1.0)
    assert torch.allclose(found - y, expected(x, (adapter,) * 5))
    found, x, y = y[:2].clone(), x[:2], y[:2]
    made.add_lora_logits(found, x, a(), b(), 1.0)
    assert torch.equal(found - y, expected(x, (0, 12)))


def test_embeddings_have_the_term_of_each_tokens_adapter() -> None:
    rows, y = numbers(3, len(TOKENS), RANK), numbers(4, len(TOKENS), OUTPUTS)
    found = y.clone()
    products(TOKENS).add_lora_embedding(found, rows, b())
    terms = [
        b()[ACTIVE.index(adapter), 0] @ row if adapter else torch.zeros(OUTPUTS)
        for row, adapter in zip(rows, TOKENS, strict=True)
    ]
    assert torch.equal(found - y, torch.stack(terms))


def test_an_adapter_that_is_loaded_again_has_prefixes_of_its_own() -> None:
    """Under the same name and from the same folder, whose files may be others."""

    def keys(adapter: int | None) -> list[object]:
        request = make("a", 1, 8, 2, adapter=adapter)
        return hash_keys_of_adapter(_gen_lora_extra_hash_keys, request)

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)
    assert keys(None) == []
