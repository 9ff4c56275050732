"""Random numbers: a resumed request skips the draws that its history took."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from flying_serving.vllm_adapter.history import skip_draws
from tests.vllm_adapter.histories import VOCAB


@given(st.integers(0, 2**31 - 1), st.integers(0, 40), st.integers(1, 40))
def test_draws_are_skipped_as_the_sampler_of_the_cpu_makes_them(
    seed: int, count: int, more: int
) -> None:
    """One integer for each token (TopKTopPSampler.forward_cpu)."""

    def draw(generator: torch.Generator) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())

    undisturbed, resumed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    drawn = [draw(undisturbed) for _ in range(count + more)]
    skip_draws(resumed, count, VOCAB)
    assert [draw(resumed) for _ in range(more)] == drawn[count:]


def test_the_sampler_of_the_cpu_draws_what_is_skipped() -> None:
    """vLLM's own, over rows of which two have seeds."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    sampler, logits = (
        TopKTopPSampler(),
        torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)),
    )

    def sample(generators: dict[int, torch.Generator]) -> list[int]:
        return [int(token) for token in sampler(logits.clone(), generators, None, None)[0][[0, 2]]]

    undisturbed = {0: torch.Generator().manual_seed(5), 2: torch.Generator().manual_seed(6)}
    tokens = [sample(undisturbed) for _ in range(30)]
    for kept in (1, 7, 29):
        resumed = {0: torch.Generator().manual_seed(5), 2: torch.Generator().manual_seed(6)}
        for generator in resumed.values():
            skip_draws(generator, kept, VOCAB)
        assert [sample(resumed) for _ in range(30 - kept)] == tokens[kept:]


class OffsetGenerator:
    """A CPU generator that counts its steps, as CUDA's does, and can be set to a step.

    Exponential noise for n tokens takes n steps here.
    """

    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self.offset = 4

    def get_offset(self) -> int:
        """Return the steps so far."""
        return self.offset

    def set_offset(self, offset: int) -> None:
        """Go to a step."""
        self.offset = offset


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_draws_are_skipped_by_their_steps_on_cuda(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As many for each as one draw over the vocabulary takes, in vLLM's shape and type."""
    asked = []

    class Noise:
        def exponential_(self, generator: OffsetGenerator) -> None:
            generator.offset += VOCAB

    def empty(*shape: int, **options: Any) -> Noise:
        asked.append((shape, options))
        return Noise()

    generator: Any = OffsetGenerator()
    monkeypatch.setattr(torch, "empty", empty)
    skip_draws(generator, count, VOCAB)
    assert generator.offset == 4 + count * VOCAB
    assert asked == [((VOCAB,), {"device": generator.device})]


def test_vllm_draws_noise_of_the_type_that_is_skipped() -> None:
    """`random_sample` draws as many numbers of the default type as the vocabulary has tokens."""
    seeded, plain = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    random_sample(torch.full((1, VOCAB), 1 / VOCAB), {0: seeded})
    torch.empty(VOCAB).exponential_(generator=plain)
    assert torch.equal(seeded.get_state(), plain.get_state())
