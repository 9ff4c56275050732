"""Random numbers: a resumed request skips the draws that its history took."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from flying_serving.vllm_adapter.speculation import draws
from flying_serving.vllm_adapter.speculation.draws import skip_draws, words_of
from tests.with_vllm.vllm_adapter.histories import VOCAB


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


@given(st.integers(0, 2**31 - 1), st.lists(st.integers(0, 5), max_size=8))
def test_draws_for_drafts_are_skipped_as_vllm_makes_them(seed: int, drafts: list[int]) -> None:
    """By its own functions: each step draws for its token, then for its drafts, if it has any."""
    undisturbed, resumed = (torch.Generator().manual_seed(seed) for _ in range(2))
    for count in drafts:
        torch.randint(0, 2**31, (1,), generator=undisturbed, dtype=torch.long)
        draw_for_drafts(undisturbed, count)
    skip_draws(resumed, len(drafts), VOCAB, [count for count in drafts if count])
    more = [torch.rand(3, generator=generator) for generator in (undisturbed, resumed)]
    assert torch.equal(*more)


def draw_for_drafts(generator: torch.Generator, count: int) -> None:
    """Draw what the rejection sampler draws for a request with `count` drafts."""
    cpu, generators = torch.device("cpu"), {0: generator}
    rejection_sampler.generate_uniform_probs(count, [count], generators, cpu)
    with pytest.MonkeyPatch.context() as patch:  # what follows the draws needs a kernel
        patch.setattr(rejection_sampler, "_sample_recovered_tokens", lambda *_, **__: None)
        rejection_sampler.sample_recovered_tokens(
            count,
            [count],
            torch.tensor([count], dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            None,
            torch.full((count, VOCAB), 1 / VOCAB),
            SimpleNamespace(generators=generators),
            cpu,
        )


def test_words_of_a_draw_are_counted() -> None:
    assert words_of(lambda generator: torch.rand(1, generator=generator), 4) == 1
    assert words_of(lambda g: torch.randint(0, 2**31, (3,), generator=g), 8) == 6
    with pytest.raises(ValueError, match="more than 4 words"):
        words_of(lambda generator: torch.rand(100, generator=generator), 4)


@pytest.mark.parametrize("words", [0, 1, 7, 20])
def test_words_are_skipped_some_at_a_time(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    monkeypatch.setattr(draws, "_WORDS_AT_A_TIME", 7)
    skipped, drawn = (torch.Generator().manual_seed(3) for _ in range(2))
    draws._skip_words(skipped, words)
    draws._draw_words(drawn, words)
    assert torch.equal(skipped.get_state(), drawn.get_state())
